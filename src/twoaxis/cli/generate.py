"""`twoaxis generate`: let a trained run write on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from twoaxis.cli.options import check_seed
from twoaxis.errors import InputError


@dataclass
class Args:
    """Let a trained run write on from a prompt."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    prompt: str = "\n"
    """Text to go on from."""
    stream: bool = False
    """Write the text as it is made, not at the end."""
    max_new_tokens: int = 200
    """Tokens to write."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; higher is more varied."""
    top_k: int | None = None
    """Draw only from the k likeliest tokens."""
    top_p: float | None = None
    """Draw only from the fewest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that are there already less likely."""
    stop: tuple[str, ...] = ()
    """End before any of these texts is written."""
    prompt_lookup: int = 0
    """With --temperature 0: draft so many tokens from what is there already; the same text, faster."""
    seed: int = 0
    """Seed of the draws: the same seed writes the same text."""


def run(args: Args) -> int:
    """Print the prompt and what the model makes of it; 0."""
    import torch

    from twoaxis.model import generate_text
    from twoaxis.train import load_run

    check_seed(args.seed)
    model, tokenizer, _ = load_run(args.run)
    ids = tokenizer.encode(args.prompt)
    if not len(ids):
        raise InputError("--prompt is empty: give at least one character")
    device = model.embedding.weight.device
    pieces = generate_text(
        model,
        torch.from_numpy(ids.copy())[None].to(device),
        args.max_new_tokens,
        args.temperature,
        decode=tokenizer.decode,
        stop=args.stop,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        prompt_lookup=args.prompt_lookup,
        generator=torch.Generator(device).manual_seed(args.seed),
    )
    if args.stream:
        print(args.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    else:
        print(args.prompt + "".join(pieces))
    return 0
