"""Loss curves of a comparison: one line per row, the mean over its seeds with the range between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from twoaxis.study.chart import Chart, Series
from twoaxis.study.units import duration, short
from twoaxis.train.metrics import read_metrics

AXES = (
    ("tokens", "tokens", short),
    ("flops", "FLOPs", short),
    ("seconds", "seconds of training steps", duration),
)
SMOOTH = 50  # training curves have about this many points, each a mean over its steps
Steps = list[dict[str, Any]]


def charts(folder: Path, results: dict[str, Any]) -> tuple[list[Chart], list[Chart]]:
    """Charts of the validation score and of the training loss, each against tokens, FLOPs and seconds."""
    runs = {row["name"]: _finished(folder, row) for row in results["rows"]}
    scored = {name: [[s for s in run if "val_bits_per_byte" in s] for run in of] for name, of in runs.items()}
    smoothed = {name: [_smooth(run) for run in of] for name, of in runs.items()}
    guides = [(name, v) for name, v in results["yardsticks"].items() if name in ("xz -9e", "gzip -9")]
    valid, training = [], []
    for key, label, text in AXES:
        chart = partial(_chart, x_label=label, x_text=text)
        scores, losses = _series(scored, key, "val_bits_per_byte"), _series(smoothed, key, "loss")
        valid.append(chart("Validation", "bits per byte", scores, guides=guides, dots=True))
        training.append(chart("Training", "loss in nats per token", losses))
    return valid, training


def _chart(title: str, y_label: str, series: list[Series], **more: Any) -> Chart:
    return Chart(title=title, y_label=y_label, series=series, y_max=_top(series), **more)


def _top(series: Sequence[Series]) -> float | None:
    """The highest value after the first fifth: cutting off what is above lets the rest be told apart."""
    return max((s.y[len(s.y) // 5] for s in series if len(s.y)), default=None)


def _finished(folder: Path, row: dict[str, Any]) -> list[Steps]:
    paths = [
        folder / "runs" / row["slug"] / f"seed-{r['seed']}" for r in row["runs"] if r["status"] == "done"
    ]
    return [read_metrics(path / "metrics.jsonl") for path in paths]


def _smooth(run: Steps) -> Steps:
    """Means over pieces of equal length, placed at the last step of each."""
    size = max(1, round(len(run) / SMOOTH))
    pieces = [run[i : i + size] for i in range(0, len(run) - size + 1, size)]
    return [piece[-1] | {"loss": fmean(step["loss"] for step in piece)} for piece in pieces]


def _series(runs: dict[str, list[Steps]], x: str, y: str) -> list[Series]:
    """One series per row, over the steps that all its runs have."""
    series = []
    for index, (name, of) in enumerate(runs.items()):
        by_step = [{s["step"]: s for s in run} for run in of]
        shared = sorted(set.intersection(*map(set, by_step))) if by_step else []
        at = [[run[step] for run in by_step] for step in shared]
        several = len(by_step) > 1
        series.append(
            Series(
                label=name,
                index=index,
                x=_each(at, x, fmean),
                y=_each(at, y, fmean),
                low=_each(at, y, min) if several else (),
                high=_each(at, y, max) if several else (),
            )
        )
    return series


def _each(at: Sequence[Steps], key: str, of: Any) -> list[float]:
    return [of([float(step[key]) for step in steps]) for steps in at]
