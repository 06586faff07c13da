"""`twoaxis report FOLDER`: write the report of a comparison again, from its run folders."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

WIDE = 200  # characters where there is no terminal to fit into


@dataclass
class Args:
    """Write results.json and report.html of a comparison again, from its run folders."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder that `twoaxis compare` wrote."""
    json: bool = False
    """Print the results as JSON."""


def run(args: Args) -> int:
    """Report; 1 if a run of the comparison failed."""
    from twoaxis.study import collect, write_report
    from twoaxis.study.compare import write_json

    results = collect(args.folder)
    write_json(args.folder / "results.json", results)
    report = write_report(args.folder, results)
    if args.json:
        print(json.dumps(results))
    else:
        show(results, report)
    return 1 if results["failed"] else 0


def show(results: dict[str, Any], report: Path) -> None:
    """Print the table, the verdicts and where the report is."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False)
    console.print(table(results))
    lines = []
    for row in results["rows"]:
        for one in row["runs"]:
            if one["error"]:
                lines.append(f"{row['name']}, seed {one['seed']} failed: {one['error']}")
    lines += [f"{verdict['row']}: {verdict['words']}" for verdict in results["verdicts"]]
    lines += [results["matched"], results["advice"], f"report: {report}"]
    for line in filter(None, lines):
        console.print(line, soft_wrap=True)


def table(results: dict[str, Any]) -> Any:
    """The rows as a rich table."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = Table(box=box.SIMPLE_HEAD)
    found.add_column("row", overflow="fold")
    for name in (
        "bits per byte",
        "parameters",
        "FLOPs/token",
        "tokens/s",
        "(low to high)",
        "saved for backward",
        "decode state",
        "runs",
    ):
        found.add_column(name, justify="right")
    base = results["rows"][0]
    for row in results["rows"]:
        found.add_row(*(Text(cell) for cell in _cells(row, base)))
    return found


def _cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    from twoaxis.study.units import mebibytes, percent, si

    score, spread, measured = row["valid_bits_per_byte"], row["spread"], row["measured"]
    done = sum(run["status"] == "done" for run in row["runs"])
    speed = ["-"] * 4
    if measured:
        speed = [
            si(measured["median"]),
            f"{si(measured['low'])} to {si(measured['high'])}",
            mebibytes(measured["saved_bytes"]),
            mebibytes(measured["decode_state_bytes"]),
        ]
    return [
        row["name"],
        "-" if score is None else f"{score:.3f}" + (f" ± {spread:.3f}" if spread is not None else ""),
        f"{si(row['parameters'])} ({percent(row['parameters'] / base['parameters'] - 1)})",
        f"{si(row['flops_per_token'])} ({percent(row['flops_per_token'] / base['flops_per_token'] - 1)})",
        *speed,
        f"{done}/{len(row['runs'])}",
    ]
