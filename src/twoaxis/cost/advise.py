"""The adviser: the paper's fork first, then what this budget, machine and layout change.

Candidates are tried in the fork's order. One is taken unless there is an objection:

    memory   a device does not hold it, even with every block recomputed
    window   the window shows at least half of the context: full attention mixes as locally already
    price    the predicted step takes more than the budget longer than the standard model's; with what takes it:
             arithmetic, memory traffic, launches or sending
    own      own runs found it worse than their baseline beyond their noise

The last candidate is the standard Transformer, which nothing speaks against.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from twoaxis import spec
from twoaxis.cost.advice import Advice, Objection, Request, Trial
from twoaxis.cost.evidence import evidence
from twoaxis.cost.fork import WORDS, candidates, others
from twoaxis.cost.rows import Point, Row, row
from twoaxis.cost.runs import own_results

SHOWN = 0.5  # share of the visible pairs from which a window is no local mixing


def advise(
    request: Request, *, runs: Path | None = None, extra: Path | None = None, table: bool = True
) -> Advice:
    """Decide. runs: a comparison folder with own results. extra: a file of more published results.

    table: also predict every other method and the combinations. Raises InputError for impossible requests.
    """
    from twoaxis.cost.case import against, experiment

    results, own = evidence(extra), own_results(runs)
    made: dict[Point, Row] = {}

    def at(point: Point) -> Row:
        if point not in made:
            base = None if point == Point() else at(Point())
            made[point] = row(
                request.model, point, request.machine, request.load, request.mesh, results, own, base
            )
        return made[point]

    trials: list[Trial] = []
    for point in candidates(request.goal, request.window):
        trials.append(Trial(at(point), tuple(_objections(request, at(point), at(Point())))))
        if not trials[-1].objections:
            break
    silent = []
    for point in others(request.window) if table else ():
        config = spec.parse_spec("depth", point.depth)
        if config.trace is None:
            silent.append(f"{point.name} is left out: {config.untraced}")
        else:
            at(point)
    advice = Advice(
        request=request,
        fork=WORDS[request.goal],
        trials=tuple(trials),
        rows=tuple(
            sorted(
                made.values(), key=lambda r: (r.point.depth != "additive" or bool(r.point.before), r.overhead)
            )
        ),
        notes=(*_notes(request, at(Point())), *silent),
    )
    return dataclasses.replace(advice, against=tuple(against(advice)), experiment=experiment(advice))


def _objections(request: Request, own: Row, base: Row) -> list[Objection]:
    found = []
    if own.point == Point():
        return []
    if not own.fits:
        held = 1e-9 * (own.memory.model + own.memory.checkpointed)
        how = "" if request.load.decoding else ", recomputing blocks"
        found.append(
            Objection(
                "memory",
                f"needs {held:.3g} GB on a device of {request.machine.memory_gb:g}{how}",
            )
        )
    if any(name.startswith("short_swa") for name in own.point.before):
        share = _pairs(request.load.seq_len, request.window) / _pairs(
            request.load.seq_len, request.load.seq_len
        )
        if share >= SHOWN:
            found.append(
                Objection(
                    "window",
                    f"a window of {request.window} shows {share:.0%} of what full attention sees in "
                    f"{request.load.seq_len} tokens",
                )
            )
    if own.overhead > request.budget:
        by = dearest(own, base)
        found.append(
            Objection(
                "price",
                f"a step takes {own.overhead:+.1%}, over the budget of {request.budget:.0%}: {by}",
                by,
            )
        )
    worse = [r for r in own.own if r["call"] == "worse"]
    if worse:
        found.append(Objection("own", f"own runs: {worse[0]['words']}"))
    return found


def dearest(own: Row, base: Row) -> str:
    """What of the step grew most: arithmetic, memory, launches or sending."""
    a, b = own.step, base.step
    grown = {
        "arithmetic": a.arithmetic - b.arithmetic,
        "memory": a.memory - b.memory,
        "sending": (a.tensor + a.sequence + a.send) - (b.tensor + b.sequence + b.send),
        "launches": max(0.0, a.launch - max(a.device if a.hides_launches else 0.0, b.launch)),
    }
    return max(grown, key=lambda name: grown[name])


def _pairs(seq_len: int, window: int) -> int:
    return window * seq_len - window * (window - 1) // 2


def _notes(request: Request, base: Row) -> list[str]:
    notes = []
    unknown = request.machine.unknown()
    if "launch_us" in unknown:
        notes.append(f"{request.machine.name}: the cost of a launch is unknown and counted as nothing")
    if "memory_gb" in unknown:
        notes.append(f"{request.machine.name}: its memory is unknown, so everything is taken to fit")
    if not base.fits:
        notes.append(
            "the standard model itself does not fit this layout: choose a larger mesh or a smaller load"
        )
    if not request.machine.copy_curve:
        notes.append(
            "rates are peaks of data sheets: times are lower bounds; --measure calibrates this machine"
        )
    return notes


def plain(advice: Advice) -> dict[str, Any]:
    """Plain data for `--json`."""
    request = advice.request
    load = {name: getattr(request.load, name) for name in request.load.__dataclass_fields__}
    return {
        "request": {
            "model": request.size.name,
            "hardware": request.machine.name,
            "mesh": str(request.mesh),
            "goal": request.goal,
            "window": request.window,
            "budget": request.budget,
            **load,
        },
        "fork": advice.fork,
        "path": [
            {
                "candidate": t.row.point.name,
                "overhead": t.row.overhead,
                "taken": not t.objections,
                "objections": [{"kind": o.kind, "by": o.by, "words": o.words} for o in t.objections],
            }
            for t in advice.trials
        ],
        "recommendation": advice.choice.to_dict(),
        "against": list(advice.against),
        "experiment": advice.experiment,
        "notes": list(advice.notes),
        "rows": [r.to_dict() for r in advice.rows],
    }
