"""`twoaxis train`: train one model.

Every field of TrainConfig and of ModelConfig is a flag. What a flag does not set comes from `--config FILE`,
then from the folder that `--init` names (the model only), then from the defaults.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from twoaxis.cli.dry_run import model_of, show_dry_run
from twoaxis.cli.pipeline_plan import show_plan
from twoaxis.cli.train_flags import DEFAULTS, MODEL, Args
from twoaxis.data import load_tokenizer
from twoaxis.errors import InputError
from twoaxis.train import TrainConfig, read_yaml, train
from twoaxis.train.run import RunFolder, weights_folder

__all__ = ["Args", "configuration", "run"]

INTERRUPTED = 130  # the exit code of a run that a signal ended; it can be resumed


def run(args: Any) -> int:
    """Train, or go on training, and say what came out."""
    if args.out is None and not (args.pipeline_plan or args.dry_run):
        raise InputError("train writes a run folder: give --out FOLDER")
    if args.pipeline_plan and args.dry_run:
        raise InputError("--pipeline-plan and --dry-run print two things: give one of them")
    if not args.dry_run and (args.mesh or args.hardware or args.memory_gb is not None):
        raise InputError("--mesh, --hardware and --memory-gb describe a dry run: add --dry-run")
    cfg = configuration(args)
    if args.pipeline_plan:
        return show_plan(cfg, args.json)
    if args.dry_run:
        return show_dry_run(cfg, args.mesh, args.hardware, args.memory_gb, args.json)
    others = int(os.environ.get("RANK", "0")) > 0  # under torchrun the first process speaks
    console = Console(stderr=True, quiet=others)
    handler = RichHandler(console=console, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    with _Progress(cfg, console) as progress:
        results = train(cfg, args.out, resume=args.resume, on_step=progress.show)
    if others:
        pass
    elif args.json:
        print(json.dumps(results))
    else:
        _tell(results, args.out)
    return 0 if results["status"] == "done" else INTERRUPTED


def configuration(args: Any) -> TrainConfig:
    """The run that flags, file and saved model describe."""
    given = {k: v for k, v in vars(args).items() if v is not None}
    given = {k: v for k, v in given.items() if not isinstance(v, bool) or v != DEFAULTS.get(k)}
    run_folder = RunFolder(Path(args.out or ""))
    if args.resume and args.out and args.config is None and run_folder.config.exists():
        data = run_folder.read_config().to_dict()
        data["checkpoint_async"] &= given.get("checkpoint_format") != "file"  # which are never written so
    else:
        data = read_yaml(args.config) if args.config else {}
        TrainConfig.from_dict(data, args.config or "")
    train_fields = [f.name for f in dataclasses.fields(TrainConfig)]
    data |= {k: v for k, v in given.items() if k in train_fields}
    model = dict(data.get("model") or {})
    if not model and data.get("init"):
        model = _saved_model(data["init"])
    model = (model_of(args.size) if args.size else {}) | model
    model |= {k: v for k, v in given.items() if k in MODEL}
    model.setdefault("vocab_size", _vocab_size(data.get("tokenizer", "byte")))
    if isinstance(model.get("sequence"), tuple):
        model["sequence"] = list(model["sequence"])
    return TrainConfig.from_dict({**data, "model": model}, args.config or "the command line")


def _vocab_size(tokenizer: str) -> int:
    size = tokenizer.removeprefix("bpe:")
    return int(size) if size.isdigit() else load_tokenizer(tokenizer).vocab_size


def _saved_model(folder: str) -> dict[str, Any]:
    path = weights_folder(folder) / "config.json"
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--init {folder}: cannot read {path} ({error}); give a model or run folder"
        ) from None
    return saved


class _Progress:
    """A bar with loss, tokens per second and time left, on a terminal; elsewhere ten lines, or one a minute."""

    def __init__(self, cfg: TrainConfig, console: Console) -> None:
        self.cfg, self.console = cfg, console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("training", total=cfg.steps, said="")
        self.before: tuple[int, float] | None = None
        self.said = time.monotonic()  # of the last line

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, row: dict[str, Any]) -> None:
        tokens, seconds = self.before or (0, 0.0)  # the mean so far, when resuming
        rate = (row["tokens"] - tokens) / max(row["seconds"] - seconds, 1e-9)
        self.before = (row["tokens"], row["seconds"])
        said = f"step {row['step']}/{self.cfg.steps}  loss {row['loss']:.3f}  {rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=row["step"], said=said)
        due = row["step"] % max(self.cfg.steps // 10, 1) == 0 or time.monotonic() - self.said >= 60
        if "val_bits_per_byte" in row:
            self.console.print(f"step {row['step']}: {row['val_bits_per_byte']:.4f} validation bits per byte")
        elif due and not self.console.is_terminal:
            self.console.print(said)
            self.said = time.monotonic()


def _tell(results: dict[str, Any], out: str) -> None:
    score = results["valid_bits_per_byte"]
    said = f"{score:.4f} validation bits per byte" if score is not None else "not validated"
    print(f"{out}: {results['status']} after {results['steps']} steps, {said}")
    if results["status"] == "interrupted":
        print(f"go on with: twoaxis train --out {out} --resume")
