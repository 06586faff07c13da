"""From a comparison folder to the facts of its report, as plain data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from twoaxis.errors import InputError, RunError
from twoaxis.study.budgets import budgets, unmatched, widened_baselines
from twoaxis.study.file import read_study
from twoaxis.study.grid import Row, Study
from twoaxis.study.statistics import spread, verdicts
from twoaxis.study.words import advice, matched_words
from twoaxis.study.yardsticks import yardsticks

NUMBERS = ("valid_bits_per_byte", "seconds", "tokens_per_second")


def run_folder(folder: Path, row: Row, seed: int) -> Path:
    """Where a run of a comparison lies."""
    return folder / "runs" / row.slug / f"seed-{seed}"


def plain(study: Study) -> dict[str, Any]:
    """The study as it is written down: without the folder that it lies in."""
    return {key: value for key, value in study.to_dict().items() if key != "out"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no file; a damaged one raises RunError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); delete it and run again") from None
    if not isinstance(data, dict):
        raise RunError(f"{path} does not hold an object; delete it and run again")
    return data


def collect(folder: str | Path) -> dict[str, Any]:
    """All that the report of a comparison says, from its folder: `results.json` as data."""
    folder = Path(folder)
    if not (folder / "study.yaml").is_file():
        raise InputError(f"{folder} is not a comparison: it has no study.yaml; give one that compare wrote")
    study = read_study(folder / "study.yaml")
    about = read_json(folder / "about.json")
    rows = [_row(study, row, folder, about.get("rows", {}).get(row.name, {})) for row in study.rows]
    scores = {row["name"]: _scores(row) for row in rows}
    for row in rows[1:]:
        row["unmatched"] = "; ".join(filter(None, (row["unmatched"], *_unlike(row, rows[0])))) or None
    apart = {row["name"]: row["unmatched"] for row in rows if row["unmatched"]}
    judged = verdicts(scores, study.baseline.name, apart)
    runs = [run for row in rows for run in row["runs"]]
    return {
        "command": about.get("command", ""),
        "environment": about.get("environment", {}),
        "study": _without_places(plain(study)),
        "baseline": study.baseline.name,
        "matched": matched_words(study),
        "yardsticks": yardsticks(study.training.data, study.training.valid_fraction),
        "rows": rows,
        "verdicts": [verdict.to_dict() for verdict in judged],
        "advice": advice(study, runs),
        "not_measured": about.get("not_measured"),
        **{
            status: sum(run["status"] == status for run in runs)
            for status in ("done", "failed", "unfinished")
        },
    }


def _unlike(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Why the runs of two rows do not allow a ranking, whatever their budgets.

    A failed run counts: leaving it out would compare the method on the seeds that suit it.
    """
    failed = [f"{r['name']} failed on seed {x['seed']}" for r in (base, row) for x in r["runs"] if x["error"]]
    used = {json.dumps(x["data"]) for r in (base, row) for x in r["runs"] if x["status"] == "done"}
    return [*failed, *(["the data changed between runs"] if len(used) > 1 else [])]


def _without_places(study: dict[str, Any]) -> dict[str, Any]:
    """The study with the bare names of files and folders, for a report that is shown to others."""
    named = {k: study["train"][k] and Path(study["train"][k]).name for k in ("data", "tokenizer", "init")}
    return study | {"train": study["train"] | named}


def _row(study: Study, row: Row, folder: Path, measured: dict[str, Any]) -> dict[str, Any]:
    cfg, base = (study.config(r, study.seeds[0]) for r in (row, study.baseline))
    runs = [_run(run_folder(folder, row, seed), seed) for seed in study.seeds]
    scores = [run["valid_bits_per_byte"] for run in runs if run["status"] == "done"]
    return {
        "name": row.name,
        "slug": row.slug,
        "depth": cfg.model.depth,
        "sequence": cfg.model.sequence,
        **budgets(cfg),
        "settings_tried": 1,
        "valid_bits_per_byte": fmean(scores) if scores else None,
        "spread": spread(scores),
        "measured": measured,
        "unmatched": unmatched(cfg, base, study.match),
        "controls": widened_baselines(cfg, base) if study.match == "width" else [],
        "runs": runs,
    }


def _run(path: Path, seed: int) -> dict[str, Any]:
    found = read_json(path / "results.json")
    status = found.get("status")
    if status == "done" and found.get("valid_bits_per_byte") is None:
        status, found["error"] = "failed", "there is no validation text to score it on"
    numbers = [found.get(k) for k in NUMBERS]
    if not all(x is None or (isinstance(x, int | float) and math.isfinite(x)) for x in numbers):
        raise RunError(f"{path / 'results.json'} is damaged; delete it and run again")
    return {
        "seed": seed,
        "status": status if status in ("done", "failed") else "unfinished",
        "error": found.get("error"),
        "data": found.get("data"),
        "valid_bits_per_byte": found.get("valid_bits_per_byte") if status == "done" else None,
        "seconds": found.get("seconds"),
        "tokens_per_second": found.get("tokens_per_second"),
    }


def _scores(row: dict[str, Any]) -> dict[int, float]:
    return {r["seed"]: r["valid_bits_per_byte"] for r in row["runs"] if r["status"] == "done"}
