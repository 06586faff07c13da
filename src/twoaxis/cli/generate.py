"""`twoaxis generate`: let a trained run write on, printed as it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from twoaxis.data import Tokenizer
from twoaxis.errors import InputError
from twoaxis.model import generate


@dataclass
class Args:
    """Let a trained run write on from a prompt."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    prompt: str = "\n"
    """Text to go on from."""
    max_new_tokens: int = 200
    """Tokens to write."""
    temperature: float = 0.8
    """0 takes the likeliest token each time; higher is more varied."""
    top_k: int | None = None
    """Draw only from the k likeliest tokens."""
    top_p: float | None = None
    """Draw only from the fewest tokens that together have this probability."""
    seed: int = 0
    """Seed of the draws: the same seed writes the same text."""


def run(args: Args) -> int:
    """Print the prompt and what the model makes of it; 0."""
    from twoaxis.train import load_run

    model, tokenizer, _ = load_run(args.run)
    ids = tokenizer.encode(args.prompt)
    if not len(ids):
        raise InputError("--prompt is empty: give at least one character")
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(args.seed)
    written = Typewriter(tokenizer, lambda text: print(text, end="", flush=True), args.prompt)
    tokens = torch.from_numpy(ids.copy())[None].to(device)
    generate(
        model,
        tokens,
        args.max_new_tokens,
        args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=generator,
        on_token=lambda new: written(int(new)),
    )
    written.finish()
    print()
    return 0


class Typewriter:
    """Turns ids into text one by one; the bytes of an unfinished character wait for the rest of it.

    before: text that is written ahead of the first id's.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], None], before: str = "") -> None:
        self.tokenizer, self.write, self.before = tokenizer, write, before
        self.waiting: list[int] = []

    def __call__(self, id_: int) -> None:
        self.waiting.append(id_)
        text = self.tokenizer.decode(self.waiting)
        if not text.endswith("\ufffd") or len(self.waiting) >= 8:  # no character is longer than 4 bytes
            self.finish()

    def finish(self) -> None:
        """Write what is waiting, finished or not."""
        if text := self.before + self.tokenizer.decode(self.waiting):
            self.write(text)
        self.before, self.waiting = "", []
