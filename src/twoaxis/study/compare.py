"""The main job: train every row on every seed, measure them side by side, and write the report.

OUT/study.yaml              the resolved study
    runs/ROW/seed-N/        one run folder each
    about.json              command, environment, measured speeds
    results.json            everything the report says, as data
    report.html
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from twoaxis.errors import InputError, RunError
from twoaxis.model import write_atomically
from twoaxis.study.checks import check_inputs, refuse_other_runs
from twoaxis.study.collect import collect, plain, read_json, run_folder
from twoaxis.study.environment import environment
from twoaxis.study.grid import Row, Study
from twoaxis.study.measure import WARMUP, measure
from twoaxis.study.report import write_report
from twoaxis.train import TrainConfig, train
from twoaxis.train.run import RunFolder

log = logging.getLogger(__name__)
Kind = Literal["skipped", "start", "step", "done", "failed", "measuring", "written"]


@dataclass(frozen=True)
class Event:
    """Something that happened. number: of the run, from 1. data: a step's metrics, results, an error."""

    kind: Kind
    row: str = ""
    seed: int = 0
    number: int = 0
    total: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]


def compare(
    study: Study, out: str | Path | None = None, on_event: Listener | None = None, *, command: str = ""
) -> dict[str, Any]:
    """Run a study in the folder `out` (by default the study's own) and return what its `results.json` holds.

    Runs that are finished there are skipped, interrupted ones go on where they stopped, and a run that fails
    is recorded and does not stop the others. on_event: called as things happen. command: shown in the report.

    Raises InputError if no run could start or the folder holds runs of other settings, and KeyboardInterrupt
    after SIGINT or SIGTERM.
    """
    if not isinstance(study, Study):
        raise InputError(f"what is compared is a twoaxis.study.Study, not {type(study).__name__}")
    folder, tell = Path(study.out if out is None else out), on_event or (lambda event: None)
    check_inputs(study.config(study.baseline, study.seeds[0]))
    refuse_other_runs(study, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write in {folder}: {error.strerror}; give another folder") from None
    text = yaml.safe_dump(plain(study), sort_keys=False, allow_unicode=True)
    write_atomically(folder / "study.yaml", text.encode())
    before = torch.get_num_threads()
    torch.set_num_threads(study.threads or before)
    try:
        return _compare(study, folder, tell, command)
    finally:
        torch.set_num_threads(before)


def _compare(study: Study, folder: Path, tell: Listener, command: str) -> dict[str, Any]:
    about = {"environment": environment()} | read_json(folder / "about.json")
    write_json(folder / "about.json", about | {"command": command})
    runs = study.runs()
    for number, (row, seed) in enumerate(runs, 1):
        _one(study, row, seed, folder, partial(_tell, tell, row.name, seed, number, len(runs)))
    _measure(study, folder, tell)
    results = collect(folder)
    write_json(folder / "results.json", results)
    tell(Event("written", data={"report": str(write_report(folder, results))}))
    return results


def _one(
    study: Study, row: Row, seed: int, folder: Path, tell: Callable[[Kind, Mapping[str, Any]], None]
) -> None:
    """Train one run unless it is done; a failure is written down."""
    run = RunFolder(run_folder(folder, row, seed))
    done = read_json(run.results)
    if done.get("status") == "done" and run.config.is_file():
        tell("skipped", done)
        return
    tell("start", {"steps": study.config(row, seed).steps})
    try:
        begun = run.config.exists()
        results = train(
            study.config(row, seed), run.path, resume=begun, on_step=lambda step: tell("step", step)
        )
    except Exception as error:
        log.debug("%s, seed %d", row.name, seed, exc_info=True)
        known = isinstance(error, InputError | RunError)
        reason = " ".join((str(error) if known else f"{type(error).__name__}: {error}").split())
        run.path.mkdir(parents=True, exist_ok=True)
        write_json(run.results, read_json(run.results) | {"status": "failed", "error": reason})
        tell("failed", {"error": reason})
        return
    if results["status"] == "interrupted":
        raise KeyboardInterrupt(
            f"interrupted after step {results['steps']} of {row.name}; run it again to go on"
        )
    tell("done", results)


def _tell(
    tell: Listener, row: str, seed: int, number: int, total: int, kind: Kind, data: Mapping[str, Any]
) -> None:
    tell(Event(kind, row, seed, number, total, data))


def _measure(study: Study, folder: Path, tell: Listener) -> None:
    """Measure the rows that have a finished run, unless the same ones were measured here before."""
    configs: dict[str, TrainConfig] = {}
    for row, seed in study.runs():
        done = read_json(run_folder(folder, row, seed) / "results.json").get("status") == "done"
        if done and row.name not in configs:
            configs[row.name] = study.config(row, seed)
    about = read_json(folder / "about.json")
    what = json.dumps({name: cfg.to_dict() for name, cfg in configs.items()}, sort_keys=True)
    mark = hashlib.sha256(what.encode()).hexdigest()
    if not configs or about.get("measured_for") == mark:
        return
    measured: dict[str, Any] = {
        "environment": environment(),
        "measured_for": mark,
        "warmup": WARMUP,
        "not_measured": None,
    }
    try:
        rows = measure(
            configs, on_turn=lambda turn, turns: tell(Event("measuring", number=turn, total=turns))
        )
        measured["rows"] = {name: m.to_dict() for name, m in rows.items()}
    except RuntimeError as error:  # e.g. all rows together do not fit into memory
        measured = {"rows": {}, "not_measured": str(error).splitlines()[0]}
    write_json(folder / "about.json", about | measured)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data whole."""
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())
