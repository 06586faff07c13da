"""`twoaxis freeze RUN`: set the gates of a trained hybrid to one axis for each block."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from twoaxis.errors import InputError


def _arg(text: str, kind: str) -> object:
    return tyro.conf.arg(help=text, metavar=kind)


@dataclass
class Args:
    """Set each gate between the two axes of a trained hybrid to one axis, and write the model that is left.

    The folder can be trained on: twoaxis train --init FOLDER.
    """

    run: Annotated[tyro.conf.Positional[str], _arg("the run folder", "RUN")]
    out: Annotated[str, _arg("the model folder to write", "FOLDER")]
    axes: Annotated[
        str | None,
        _arg("S (sequence) or D (depth) for each block, by hand; by the gates when not given", "STR"),
    ] = None
    max_tokens: Annotated[
        int, _arg("tokens of the validation text that the gates are averaged over", "INT")
    ] = 8192
    json: bool = False
    """print the blocks as JSON"""


def run(args: Args) -> int:
    """Write the frozen model; print what each block became and what it costs now."""
    import twoaxis
    from twoaxis.data import eval_batches, load_corpus, prepare
    from twoaxis.model.freeze import axis_shares, freeze_axes
    from twoaxis.train import load_run

    if args.max_tokens < 1:
        raise InputError(f"--max-tokens {args.max_tokens}: allowed is 1 or more")
    if Path(args.out).exists():
        raise InputError(f"--out {args.out} is there already; give a new folder")
    model, tokenizer, cfg = load_run(args.run)
    model.cfg.depth_config().frozen(
        [None] * model.cfg.n_blocks, model.cfg.n_blocks
    )  # refused before any work
    corpus = load_corpus(cfg.data, cfg.valid_fraction)
    train, valid = prepare(corpus, tokenizer)
    rows = -(-args.max_tokens // cfg.seq_len)
    text = valid if valid.n_tokens > 1 else train
    batch = next(iter(eval_batches(text, cfg.seq_len, rows, args.max_tokens, cfg.packing)))
    shares = axis_shares(model, batch.tokens, segments=batch.segments)
    frozen = freeze_axes(model, batch.tokens, segments=batch.segments, axes=args.axes)
    twoaxis.save(frozen, args.out)
    tokenizer.save(Path(args.out))
    before, after = (twoaxis.cost(m.cfg, 1, cfg.seq_len) for m in (model, frozen))
    said = {
        "out": args.out,
        "depth": frozen.cfg.depth,
        "sequence_shares": shares,
        "flops": {"before": before.flops, "after": after.flops},
        "parameters": {"before": before.parameters, "after": after.parameters},
    }
    print(json.dumps(said) if args.json else _told(said))
    return 0


def _told(said: dict[str, Any]) -> str:
    shares = ", ".join("-" if s is None else f"{s:.2f}" for s in said["sequence_shares"])
    flops, parameters = said["flops"], said["parameters"]
    return (
        f"{said['out']}: {said['depth']} (share of the sequence axis by block: {shares})\n"
        f"FLOPs {flops['after'] / flops['before']:.3f} times, parameters "
        f"{parameters['after'] / parameters['before']:.3f} times those before\n"
        f"go on with: twoaxis train --init {said['out']} --out FOLDER"
    )
