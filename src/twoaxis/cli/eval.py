"""`twoaxis eval RUN`: score a trained run on a text."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from twoaxis.cli.options import finite
from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.train import TrainConfig


def _arg(text: str, kind: str) -> object:
    return tyro.conf.arg(help=text, metavar=kind)


@dataclass
class Args:
    """Score a trained run on a text."""

    run: Annotated[tyro.conf.Positional[str], _arg("the run folder", "RUN")]
    data: Annotated[
        str | None,
        _arg(
            "shakespeare, pydocs (or NAME/train), or a path, of which everything is scored; the run's own "
            "validation text when not given",
            "DATA",
        ),
    ] = None
    seq_len: Annotated[int | None, _arg("tokens per row; the run's when not given", "INT")] = None
    batch_size: Annotated[int | None, _arg("rows at a time; the run's when not given", "INT")] = None
    max_tokens: Annotated[int | None, _arg("score that many first targets only", "INT")] = None
    device: Annotated[str, _arg("auto, cpu, cuda, cuda:N or mps", "STR")] = "auto"
    json: bool = False
    """print the score as JSON"""


def run(args: Args) -> int:
    """Print the loss of the run's newest checkpoint in bits per byte."""
    from twoaxis.data import check_vocab, tokenize
    from twoaxis.train import evaluate, load_run
    from twoaxis.train.device import choose_device
    from twoaxis.train.run import run_checkpoint

    model, tokenizer, cfg = load_run(args.run)
    texts = _texts(args.data, cfg)
    tokens = tokenize(texts, tokenizer)
    check_vocab(tokens, cfg.model.vocab_size)
    if args.data is None:
        _say_what_changed(Path(args.run), cfg.data, tokens.digest)
    seq_len = cfg.seq_len if args.seq_len is None else args.seq_len
    batch_size = cfg.batch_size if args.batch_size is None else args.batch_size
    model.to(choose_device(args.device))
    score = evaluate(model, tokens, seq_len, batch_size, args.max_tokens, cfg.precision, cfg.packing)
    said = {
        "run": args.run,
        "checkpoint": run_checkpoint(Path(args.run)).name,
        "data": args.data or cfg.data,
        "seq_len": seq_len,
        **asdict(score),
        "loss": score.loss,
    }
    if args.json:
        print(json.dumps({name: finite(value) for name, value in said.items()}))
    else:
        print(
            f"{args.run} ({said['checkpoint']}) on {said['data']}: {score.bits_per_byte:.4f} bits per byte, "
            f"{score.loss:.4f} nats per token over {score.tokens} tokens ({score.bytes:.0f} bytes)"
        )
    return 0


def _say_what_changed(run: Path, data: str, digest: str) -> None:
    """A line on stderr where the run's own text is no longer what the run was validated on."""
    try:
        before = json.loads((run / "results.json").read_text(encoding="utf-8"))["data"]["valid"]
    except (OSError, ValueError, KeyError, TypeError):  # a run that has not ended yet
        return
    if before != digest:
        line = f"{data!r} has changed since the run was validated on it: the score is of another text"
        print(f"twoaxis: {line}", file=sys.stderr)


def _texts(data: str | None, cfg: TrainConfig) -> tuple[str, ...]:
    """The documents to score."""
    from twoaxis.data import load_corpus

    corpus = load_corpus(cfg.data, cfg.valid_fraction) if data is None else load_corpus(data, 1.0)
    texts = corpus.valid or (corpus.train if data is not None else ())
    if not texts:
        raise InputError(f"the run's data {cfg.data!r} has no validation text; give --data")
    return texts
