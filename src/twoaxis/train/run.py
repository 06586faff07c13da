"""A run folder: config.yaml, tokenizer.json, metrics.jsonl, checkpoints, results.json."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from twoaxis.data import Tokenizer, load_tokenizer
from twoaxis.errors import InputError, RunError
from twoaxis.model import Decoder, load, write_atomically
from twoaxis.train.checkpoint import newest_checkpoint, remove_unfinished, step_of
from twoaxis.train.config import FREE, TrainConfig
from twoaxis.train.keys import read_yaml
from twoaxis.train.randomness import isolated
from twoaxis.train.schedule import lr_factor

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The places in a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """One folder per saved step."""
        return self.path / "checkpoints"

    @property
    def results(self) -> Path:
        """What came out."""
        return self.path / "results.json"

    def read_config(self) -> TrainConfig:
        """The run's configuration; InputError if this is not a run folder."""
        if not self.config.is_file():
            raise InputError(
                f"{self.path} is not a run folder: it has no config.yaml; give one that train wrote"
            )
        return TrainConfig.from_dict(read_yaml(self.config), str(self.config))

    def checkpoint_to_resume(self, cfg: TrainConfig, resume: bool) -> Path | None:
        """Where a run with `cfg` goes on from, None to start; refuses to mix runs."""
        if (self.path / "study.yaml").exists():
            raise InputError(
                f"{self.path} holds a comparison, whose results would be lost; give another folder"
            )
        if not resume or not self.config.exists():
            if resume and self.checkpoints.exists():
                raise InputError(
                    f"{self.path} has checkpoints and no config.yaml; put that back, or give another folder"
                )
            if self.config.exists() or self.checkpoints.exists():
                raise InputError(
                    f"{self.path} already holds a run; go on with it by --resume, or give another folder"
                )
            if resume:
                log.warning("%s holds no run to go on with; a new one starts there", self.path)
            return None
        best, skipped = newest_checkpoint(self.checkpoints)
        for line in skipped:
            log.warning("skipped checkpoint %s", line)
        refuse_changes(self.read_config(), cfg, step_of(best) if best else 0, self.path)
        if best is None:
            log.warning("%s has no complete checkpoint; the run starts from the beginning", self.path)
        return best

    def begin(self, cfg: TrainConfig, tokenizer: Tokenizer) -> None:
        """Write what a run needs to be read again; clear what an interrupted save left behind."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.checkpoints)
            tokenizer.save(self.path)
        except OSError as error:
            raise InputError(f"cannot write in {self.path}: {error.strerror}; give another folder") from None
        self.write(self.config, cfg.to_yaml())

    def write(self, path: Path, text: str) -> None:
        """Write one of the run's files whole; RunError if the disk refuses."""
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}; make room and resume") from None

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        self.write(self.results, json.dumps(results, indent=2) + "\n")


def refuse_changes(old: TrainConfig, new: TrainConfig, done: int, folder: Path) -> None:
    """InputError naming the first field that a resumed run may not change.

    Free are the fields of FREE, and how a step's rows are divided while their number stays. `steps` may change if
    the learning rates of the steps already taken would have been the same: always with schedule "constant", with
    "wsd" before its decay has begun.
    """
    before, after = _flat(old), _flat(new)
    same_rows = (
        ("batch_size", "accumulation", "data_parallel") if old.rows_per_step == new.rows_per_step else ()
    )
    for name in before:
        if name in same_rows:
            continue
        if before[name] != after[name] and name not in (*FREE, "steps"):
            raise InputError(
                f"cannot resume {folder}: it was started with {name}={before[name]!r}, "
                f"now {name}={after[name]!r}; "
                "use the same value, or start a new run in another folder"
            )
    if new.steps < done or any(lr_factor(old, s) != lr_factor(new, s) for s in range(1, done + 1)):
        raise InputError(
            f"cannot resume {folder} with steps={new.steps}: it was started with steps={old.steps}, and "
            f"the rates of its {done} steps done depend on that; use steps={old.steps}, or a new run with "
            "schedule='constant' or 'wsd'"
        )


def _flat(cfg: TrainConfig) -> dict[str, Any]:
    data = cfg.to_dict()
    model = data.pop("model")
    return {f"model.{name}": value for name, value in model.items()} | data


def load_run(folder: str | Path) -> tuple[Decoder, Tokenizer, TrainConfig]:
    """What a run made: its model, tokeniser and configuration.

    The model has the weights of the newest complete checkpoint, in float32 on the CPU, in evaluation mode.
    InputError if `folder` is not a run folder or has no complete checkpoint.
    """
    run = RunFolder(Path(folder))
    cfg = run.read_config()
    with isolated(0):  # building a model draws numbers
        model = load(run_checkpoint(run.path))
    return model.eval(), load_tokenizer(run.path), cfg


def run_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run."""
    best, skipped = newest_checkpoint(RunFolder(folder).checkpoints)
    if best is None:
        left = f" ({'; '.join(skipped)})" if skipped else ""
        raise InputError(f"{folder} has no complete checkpoint{left}; train it, or go on with --resume")
    return best


def weights_folder(path: str | Path) -> Path:
    """Where the weights that `init` names lie: a model folder itself, or a run's newest checkpoint."""
    folder = Path(path)
    return run_checkpoint(folder) if (folder / "config.yaml").is_file() else folder
