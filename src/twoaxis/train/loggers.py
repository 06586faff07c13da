"""Other loggers behind one small adapter. Each library loads only when its logger is asked for."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from twoaxis.errors import InputError
from twoaxis.train.config import TrainConfig


class Logger(ABC):
    """Receives every row of a run."""

    @abstractmethod
    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""

    @abstractmethod
    def close(self) -> None:
        """The run has ended."""


class TensorBoard(Logger):
    """Event files in the run folder's `tensorboard`."""

    def __init__(self, cfg: TrainConfig, out: Path, step: int) -> None:
        _load("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._writer = writer(str(out / "tensorboard"), purge_step=step + 1)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Tracker(Logger):
    """Weights & Biases or trackio: both have init, log and finish. The run has its folder's name."""

    def __init__(self, library: str, cfg: TrainConfig, out: Path) -> None:
        self._library = _load(library)
        self._library.init(project="twoaxis", name=out.name, config=cfg.to_dict())

    def log(self, row: dict[str, Any]) -> None:
        self._library.log(row, step=row["step"])

    def close(self) -> None:
        self._library.finish()


def make_loggers(cfg: TrainConfig, out: Path, step: int) -> list[Logger]:
    """The loggers that `cfg.loggers` names, for a run that goes on after `step`."""
    return [
        TensorBoard(cfg, out, step) if name == "tensorboard" else Tracker(name, cfg, out)
        for name in cfg.loggers
    ]


def _load(library: str) -> Any:
    try:
        return importlib.import_module(library)
    except ImportError:
        raise InputError(
            f"the logger {library!r} is not installed; pip install {library}, or leave it out"
        ) from None
