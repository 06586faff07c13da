"""The training loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twoaxis.train.config import TrainConfig


def train(
    cfg: TrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train as `cfg` says in the run folder `out` and return what `results.json` holds.

    on_step: called after every step with its line of `metrics.jsonl`.
    """
    raise NotImplementedError
