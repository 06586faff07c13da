"""What a comparison shows while it runs, on stderr: a live table on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from twoaxis.study import Event, Study
from twoaxis.study.units import duration, si

EVERY = 10.0  # seconds between lines of one run


class Log:
    """One line for each start and end, and one every few seconds."""

    def __init__(self, study: Study) -> None:
        self.steps = study.training.steps
        self._said = 0.0

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        last = event.data.get("step") == self.steps  # its end has a line of its own
        if event.kind == "written" or (event.kind == "step" and (last or now - self._said < EVERY)):
            return
        self._said = now
        print(self._line(event), file=sys.stderr, flush=True)

    def _line(self, event: Event) -> str:
        run = f"[{event.number}/{event.total}] {event.row}, seed {event.seed}"
        match event.kind:
            case "start":
                return f"{run}: {event.data['steps']} steps"
            case "step":
                return f"{run}: step {event.data['step']}/{self.steps}, {_scores(event.data)}"
            case "done" | "skipped":
                word = "done" if event.kind == "done" else "already done"
                return f"{run}: {word}, {_final(event.data)}"
            case "failed":
                return f"{run}: failed: {event.data['error']}"
            case _:
                return f"measuring speed and memory, turn {event.number}/{event.total}"


class Live:
    """A table with one line per row, drawn anew as things happen."""

    def __init__(self, study: Study) -> None:
        from rich.console import Console
        from rich.live import Live as Screen

        self.study = study
        self.state = {
            row.name: {"seed": "", "step": "waiting", "score": "", "speed": ""} for row in study.rows
        }
        self.caption = ""
        self._began: dict[str, float] = {}
        self._screen = Screen(console=Console(stderr=True), refresh_per_second=4, get_renderable=self._table)

    def __enter__(self) -> Live:
        self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.stop()

    def __call__(self, event: Event) -> None:
        if event.kind == "measuring":
            self.caption = f"measuring speed and memory: turn {event.number} of {event.total}"
        elif event.kind == "written":
            self.caption = ""
        else:
            self.caption = f"run {event.number} of {event.total}"
            self._update(self.state[event.row], event)

    def _update(self, cells: dict[str, str], event: Event) -> None:
        cells["seed"] = str(event.seed)
        steps = self.study.training.steps
        if event.kind == "start":
            cells["step"] = f"0/{steps}"
        elif event.kind == "step":
            done, seconds = event.data["step"], event.data["seconds"]
            left = duration(seconds / done * (steps - done))
            cells["step"] = f"{done}/{steps}, {left} left"
            cells["speed"] = si(event.data["tokens"] / max(seconds, 1e-9))
            cells["score"] = _scores(event.data) if "val_bits_per_byte" in event.data else cells["score"]
        elif event.kind == "failed":
            cells["step"] = f"failed: {event.data['error']}"
        else:
            cells["step"] = "done" if event.kind == "done" else "already done"
            cells["score"] = _final(event.data)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(caption=self.caption or None)
        for name in ("row", "seed", "step", "latest", "tokens/s"):
            table.add_column(name, justify="right" if name == "tokens/s" else "left")
        for name, cells in self.state.items():
            values = (name, cells["seed"], cells["step"], cells["score"], cells["speed"])
            table.add_row(*(Text(value) for value in values))
        return table


def _scores(step: Any) -> str:
    if "val_bits_per_byte" in step:
        return f"validation {step['val_bits_per_byte']:.3f} bits per byte"
    return f"loss {step['loss']:.3f}"


def _final(results: Any) -> str:
    score = results.get("valid_bits_per_byte")
    return "not validated" if score is None else f"validation {score:.3f} bits per byte"
