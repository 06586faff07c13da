"""Advice in a terminal: the path to the decision, the table of every method, the case against."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoaxis.cost.advice import Advice

WIDE = 200  # characters where there is no terminal to fit into


def console() -> Any:
    """Where advice is printed: as wide as the terminal, or `WIDE` without one."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False)


def show(advice: Advice) -> None:
    """Print the decision, the table, the case against and what would settle it."""
    request, out = advice.request, console()
    chosen = advice.choice
    lines = [advice.fork]
    for trial in advice.trials:
        said = "; ".join(o.words for o in trial.objections) or "taken"
        lines.append(f"  {trial.row.point.name} ({trial.row.overhead:+.1%}): {said}")
    out.print(
        f"{request.size.name} on {request.machine.title or request.machine.name}, {request.mesh}, "
        f"{request.load.seq_len} tokens, {'decoding' if request.load.decoding else 'training'}, goal: {request.goal}",
        style="bold",
    )
    for line in lines:
        out.print(line, soft_wrap=True)
    out.print(_table(advice))
    out.print(f"Recommendation: {chosen.point.name}, {chosen.overhead:+.1%} of a step", style="bold")
    out.print(f"The strongest case against it: {advice.against[0]}", soft_wrap=True)
    for line in advice.against[1:]:
        out.print(f"  also: {line}", soft_wrap=True)
    out.print(f"What would settle it: {advice.experiment}", soft_wrap=True)
    for note in advice.notes:
        out.print(f"note: {note}", soft_wrap=True)


def _table(advice: Advice) -> Any:
    from rich import box
    from rich.table import Table

    from twoaxis.study.units import percent, si

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")
    for name in (
        "parameters",
        "FLOPs",
        "step",
        "limited by",
        "GB a device",
        "decode state",
        "sent at a boundary",
    ):
        table.add_column(name, justify="right")
    table.add_column("standard start")
    table.add_column("evidence", overflow="fold")
    base = next(r for r in advice.rows if r.point.name == "additive")
    for row in advice.rows:
        one = row.to_dict()
        held = f"{1e-9 * one['device_bytes']:.3g}" + ("" if row.fits else " (too much)")
        table.add_row(
            row.point.name,
            f"{si(row.cost.parameters)} ({percent(row.cost.parameters / base.cost.parameters - 1)})",
            f"{si(row.cost.flops)} ({percent(row.cost.flops / base.cost.flops - 1)})",
            percent(row.overhead),
            row.step.bound,
            held + (", recomputing" if row.checkpointing else ""),
            f"{si(row.cost.decode_state_bytes)}B",
            f"{si(row.step.sent_bytes)}B" if row.step.sent_bytes else "-",
            row.start,
            _evidence(row),
        )
    return table


def _evidence(row: Any) -> str:
    """The weightiest published result in short, how many there are, and own results."""
    from twoaxis.cost.evidence import strongest

    numbers = [r for r in row.evidence if r.gain is not None and not r.about_price]
    said = [r["words"] for r in row.own]
    top = strongest(numbers)
    if top is not None:
        size = ", ".join(x for x in (top.parameters, top.tokens) if x)
        mark = " (contested)" if top.contested else ""
        said.append(
            f"{top.metric} {top.value:g} vs {top.baseline:g}, {size or 'size not stated'}, {top.source}{mark}"
        )
        said += [f"and {len(numbers) - 1} more"] if len(numbers) > 1 else []
    return "; ".join(said) or "none"
