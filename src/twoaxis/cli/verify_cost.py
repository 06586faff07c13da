"""`twoaxis verify --cost`: the cost model's numbers beside measured ones, its exponents, a table of claims."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.cli.verify import Args
    from twoaxis.verify.cost import Check
    from twoaxis.verify.scaling import Exponent
    from twoaxis.verify.schemes import Cell
    from twoaxis.verify.times import Timing


def cost(args: Args) -> int:
    """Print all; 1 if a number differs from what was measured or an exponent from the paper's."""
    from twoaxis.verify.cost import checks, models, pairs, untraced
    from twoaxis.verify.scaling import exponents
    from twoaxis.verify.schemes import cells
    from twoaxis.verify.times import timings

    if args.golden is not None or args.device != "cpu" or args.dtype != "float64" or args.seed:
        raise InputError(
            "--cost measures in float32 on the CPU, whatever the weights are; leave out --golden, --device, "
            "--dtype and --seed"
        )
    numbers = [check for cfg in models() for check in checks(cfg)] + pairs()
    fitted, table, timed = exponents(), cells(), timings()
    failed = sum(not row.passed for row in numbers) + sum(not row.passed for row in fitted)
    if args.json:
        listed = {
            "failed": failed,
            "numbers": [{**asdict(row), "passed": row.passed} for row in numbers],
            "exponents": [{**asdict(row), "passed": row.passed} for row in fitted],
            "times": [{**asdict(row), "agrees": row.agrees} for row in timed],
            "claims": [asdict(row) for row in table],
            "untraced": untraced(),
        }
        print(json.dumps(listed, indent=2))
    else:
        _show(numbers, fitted, table, timed, failed)
        for name, why in untraced().items():
            print(f"not derived from options: what {name} saves and moves ({why})")
    return 1 if failed else 0


def _show(
    numbers: list[Check], fitted: list[Exponent], table: list[Cell], timed: list[Timing], failed: int
) -> None:
    lines = [f"{'':6}  {'from options':>14}  {'measured':>14}  number"]
    for row in numbers:
        lines.append(
            f"{_verdict(row.passed)}  {row.stated:14,}  {row.measured:14,}  {row.quantity}, {row.model}"
        )
    lines += ["", f"{'':6}  {'counted':>7}  {'paper':>5}  exponent"]
    for fit in fitted:
        lines.append(
            f"{_verdict(fit.passed)}  {fit.counted:7.3f}  {fit.paper:5.0f}  in {fit.size}: {fit.work}"
        )
    lines += ["", "A table of five schemes that circulates without a source, cell by cell:"]
    for cell in table:
        verdict = "agrees" if cell.right else "WRONG "
        lines.append(f"{verdict}  {cell.scheme}, {cell.column}: said {cell.said}; counted {cell.counted}")
    lines += ["", "Times where arithmetic dominates, of one pass over another (a busy machine may differ):"]
    for time in timed:
        verdict = "agrees" if time.agrees else "differs"
        lines.append(
            f"{verdict}  {time.counted:.2f} x the FLOPs, {time.measured:.2f} x the time: {time.work}"
        )
    total = len(numbers) + len(fitted)
    lines.append(f"{failed} of {total} FAILED" if failed else f"all {total} pass")
    console = Console(highlight=False)
    for line in lines:
        console.print(line, style="red" if "FAILED" in line else None, markup=False, soft_wrap=True)


def _verdict(passed: bool) -> str:
    return f"{'pass' if passed else 'FAILED':6}"
