"""`twoaxis verify`: the duality in numbers, golden vectors against the methods, or the cost model measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.cli.options import check_seed, finite
from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.verify.backends import BackendRow
    from twoaxis.verify.golden import Result
    from twoaxis.verify.setting import Row


@dataclass
class Args:
    """Show in numbers that the two axes are one operator, replay golden vectors, or measure what is costed.

    Exit code 0: all that was run passed. 1: something failed. 2: bad input, or nothing could be run.
    """

    golden: Path | None = None
    """Replay the golden vectors under this folder (pairs of .json and .safetensors) instead."""
    cost: bool = False
    """Measure every number of the cost model over the registry, and fit its exponents, instead."""
    backends: bool = False
    """Check every backend of the operators against its reference instead, and say which is used for what."""
    device: str = "cpu"
    """Device of the duality's check, e.g. cpu, cuda, mps."""
    dtype: str = "float64"
    """Its dtype: float64, float32 or bfloat16."""
    seed: int = 0
    """Seed of its random weights."""
    json: bool = False
    """Print JSON instead of a table."""


def run(args: Args) -> int:
    """Print the table; 1 if a row failed."""
    if args.cost:
        from twoaxis.cli.verify_cost import cost

        return cost(args)
    if args.golden is not None and args.backends:
        raise InputError("--golden and --backends are two checks: give one of them")
    if args.backends:
        return backends(args)
    return golden(args) if args.golden is not None else duality(args)


def duality(args: Args) -> int:
    """Every identity in one table."""
    from twoaxis.verify.duality import duality as rows_of
    from twoaxis.verify.setting import BOUNDS

    check_seed(args.seed)
    rows = rows_of(args.dtype, args.device, args.seed)
    failed = sum(not row.passed for row in rows)
    reason = BOUNDS[args.dtype][1]
    if args.json:
        listed = [{**asdict(row), "error": finite(row.error), "passed": row.passed} for row in rows]
        _print_json(
            {"device": args.device, "dtype": args.dtype, "reason": reason, "failed": failed, "rows": listed}
        )
    else:
        _show_rows(rows, args, reason)
    return 1 if failed else 0


def golden(args: Args) -> int:
    """Every file in one table; what was not run is named, and is neither passed nor failed."""
    from twoaxis.verify.golden import run_folder

    if args.device != "cpu" or args.dtype != "float64":
        raise InputError("--golden runs on the CPU in each file's own dtype; leave out --device and --dtype")
    assert args.golden is not None
    results = run_folder(args.golden)
    count = {status: sum(r.status == status for r in results) for status in ("ok", "FAILED", "not run")}
    if args.json:
        listed = [{k: finite(v) for k, v in asdict(result).items()} for result in results]
        _print_json({"folder": str(args.golden), "count": count, "results": listed})
    else:
        _show_results(results, ", ".join(f"{n} {status}" for status, n in count.items()))
    if count["ok"] + count["FAILED"] == 0:
        raise InputError(f"none of the {len(results)} cases in {args.golden} could be run")
    return 1 if count["FAILED"] else 0


def backends(args: Args) -> int:
    """Every backend in one table, and the calls that each takes."""
    from twoaxis.ops import choice
    from twoaxis.ops.native import levels
    from twoaxis.verify.backends import backends as rows_of
    from twoaxis.verify.uses import attention_by, uses

    if args.device != "cpu" or args.dtype != "float64":
        raise InputError("--backends runs on the CPU in every dtype; leave out --device and --dtype")
    requested, level, here = choice.requested(), levels.level(), levels.available()
    if args.json:
        rows = list(rows_of())
        failed = sum(not row.passed for row in rows)
        listed = [{**asdict(row), "error": finite(row.error), "passed": row.passed} for row in rows]
        used = [asdict(use) for use in uses()]
        settled = {"requested": requested, "level": level, "levels": here, "attention": attention_by()}
        _print_json({**settled, "failed": failed, "rows": listed, "used": used})
        return 1 if failed else 0
    rows = _show_backends(rows_of())
    failed, absent = sum(not row.passed for row in rows), sum(row.error is None for row in rows)
    lines = [f"kernels are built for {level}, of {', '.join(here)} that this processor has (TWOAXIS_NATIVE)"]
    lines.append(f"attention in bfloat16 is computed by {attention_by()}")
    lines.append(f"used for what, with TWOAXIS_BACKEND={requested}:")
    lines += [f"  {use.operator:18}  {use.backend:8}  {use.call}" for use in uses()]
    passed = f"all {len(rows) - absent} pass" + (f"; {absent} are not here" if absent else "")
    lines.append(f"{failed} of {len(rows)} FAILED" if failed else passed)
    _print_lines(lines)
    return 1 if failed else 0


def _show_backends(rows: Iterable[BackendRow]) -> list[BackendRow]:
    """Each row as soon as it is measured: kernels that were never built take a second or more each."""
    _print_lines([f"{'':8}  {'error / bound':>15}  operator            backend  dtype"])
    shown = []
    for row in rows:
        verdict = "FAILED" if not row.passed else "pass" if row.error is not None else "not here"
        reason = f": {row.missing}" if row.missing else ""
        ratio = _ratio(row.error, row.bound)
        _print_lines([f"{verdict:8}  {ratio:>15}  {row.operator:18}  {row.backend:7}  {row.dtype}{reason}"])
        shown.append(row)
    return shown


def _show_rows(rows: list[Row], args: Args, reason: str) -> None:
    failed = sum(not row.passed for row in rows)
    lines = [f"{'':6}  {'largest error':>13}  {'bound':>5}  identity ({args.dtype} on {args.device})"]
    for row in rows:
        verdict = "pass" if row.passed else "FAILED"
        lines.append(f"{verdict:6}  {row.error:13.1e}  {row.bound:5.0e}  {row.name}")
    lines.append(f"errors are relative to max(1, the largest entry); the bound is {reason}")
    lines.append(f"{failed} of {len(rows)} FAILED" if failed else f"all {len(rows)} pass")
    _print_lines(lines)


def _show_results(results: list[Result], summary: str) -> None:
    lines = [f"{'':7}  {'outputs / bound':>15}  {'gradients / bound':>17}  case"]
    for r in results:
        numbers = (_ratio(r.output_error, r.output_bound), _ratio(r.gradient_error, r.gradient_bound))
        reason = f": {r.detail}" if r.detail else ""
        lines.append(f"{r.status:7}  {numbers[0]:>15}  {numbers[1]:>17}  {r.name}{reason}")
    _print_lines([*lines, f"{len(results)} cases: {summary}"])


def _ratio(error: float | None, bound: float | None) -> str:
    return "" if error is None or bound is None else f"{error:.1e} / {bound:.0e}"


def _print_lines(lines: list[str]) -> None:
    """Failures in red; long lines are left to the terminal, so that no name is ever cut."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(line, style="red" if "FAILED" in line else None, markup=False, soft_wrap=True)


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2))
