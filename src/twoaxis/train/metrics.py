"""metrics.jsonl: one line per step, appended as the run goes on and consistent after a resume."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from twoaxis.errors import RunError
from twoaxis.model import write_atomically
from twoaxis.train.loggers import Logger

ALWAYS = ("step", "tokens", "seconds", "loss")  # what every row has
RECENT = 50  # steps over which the training loss of a result is averaged


class Metrics:
    """The rows of a run, in the file and handed on to other loggers.

    step: rows after it, and a last line cut short, are dropped from the file (atomically) before the run
    goes on.
    """

    def __init__(self, path: Path, step: int, loggers: Sequence[Logger] = ()) -> None:
        self.rows = [row for row in read_metrics(path) if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        if path.exists() and path.read_bytes() != text.encode():
            write_atomically(path, text.encode())
        self.path, self.loggers = path, loggers
        self._file = path.open("a", encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; the file has it when this returns."""
        with self._writing():
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        self.rows.append(row)
        for logger in self.loggers:
            logger.log(row)

    def sync(self) -> None:
        """Wait until the rows are on the disk."""
        with self._writing():
            os.fsync(self._file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}; make room and resume") from None

    def close(self) -> None:
        """Close the file and the loggers."""
        self._file.close()
        for logger in self.loggers:
            logger.close()

    def summary(self) -> dict[str, Any]:
        """What the rows say of a run: the training loss lately, the typical speed, the last validation."""
        seconds = [row["seconds"] for row in self.rows]
        tokens = [row["tokens"] for row in self.rows]
        rates = [
            (tokens[i] - tokens[i - 1]) / max(seconds[i] - seconds[i - 1], 1e-9)
            for i in range(1, len(self.rows))
        ]
        scored: dict[str, Any] = next((row for row in reversed(self.rows) if "val_bits_per_byte" in row), {})
        return {
            "train_loss": fmean(row["loss"] for row in self.rows[-RECENT:]) if self.rows else None,
            "tokens_per_second": median(rates) if rates else None,
            "valid_bits_per_byte": scored.get("val_bits_per_byte"),
            "valid_loss": scored.get("val_loss"),
            "valid_tokens": scored.get("val_tokens"),
            "valid_step": scored.get("step"),
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, oldest first; none without a file. A last line cut short is left out."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline was not finished
        try:
            row = json.loads(line)
        except ValueError:
            raise RunError(f"{path}: line {number} is not JSON; the file is damaged") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(k), int | float) for k in ALWAYS):
            raise RunError(f"{path}: line {number} lacks {' or '.join(ALWAYS)}; the file is damaged")
        rows.append(row)
    return rows
