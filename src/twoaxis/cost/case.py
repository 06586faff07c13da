"""The strongest case against a recommendation, and the small experiment that would settle it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twoaxis.cost.evidence import Result, strongest
from twoaxis.cost.rows import Point, Row

if TYPE_CHECKING:
    from twoaxis.cost.advice import Advice


def against(advice: Advice) -> list[str]:
    """What speaks against the choice, the strongest first: own runs, contested and missing evidence, price."""
    chosen = advice.choice
    if chosen.point == Point():
        return _against_standard(advice)
    quality = [r for r in chosen.evidence if not r.about_price]
    numbers = [r for r in quality if r.gain is not None]
    found = [f"own runs did not find it better: {r['words']}" for r in chosen.own if r["call"] != "better"]
    found += [f"published against it: {r.words()}" for r in numbers if r.gain is not None and r.gain <= 0]
    if not numbers:
        found.append("no published number says that it is better than the standard Transformer")
    elif all(r.single for r in numbers):
        found.append(f"no published gain states more than one run; the weightiest: {_weightiest(numbers)}")
    found += [f"contested: {r.contested} ({r.source})" for r in quality if r.contested and r not in numbers]
    if chosen.overhead > 0:
        found.append(
            f"a step takes {chosen.overhead:+.1%}: in the time of 100 steps the standard model trains "
            f"{100 * (1 + chosen.overhead):.0f}, or is wider; compare at equal time"
        )
    found += _paper_measured_dearer(chosen)
    return found


def _against_standard(advice: Advice) -> list[str]:
    """The case against staying with the standard model: the best gain among what was turned down."""
    turned = [t.row for t in advice.trials[:-1]]
    numbers = [r for row in turned for r in row.evidence if r.gain is not None and not r.about_price]
    best = strongest(numbers)
    if best is None:
        return ["nothing that was turned down has a published number"]
    return [f"turned down here, yet published for {best.method}: {best.words()}"]


def _weightiest(results: list[Result]) -> str:
    best = strongest(results)
    return best.words() if best else "none"


def _paper_measured_dearer(chosen: Row) -> list[str]:
    """Reported prices: what authors measured, beside the prediction."""
    return [f"reported price: {r.words()}" for r in chosen.evidence if r.about_price]


def experiment(advice: Advice) -> str:
    """A comparison at small size: the choice, the standard model and the runner-up, three seeds, equal FLOPs."""
    chosen, runner = advice.choice.point, _runner_up(advice)
    depths = dict.fromkeys(["additive", chosen.depth, *([runner.depth] if runner else [])])
    locals_ = dict.fromkeys([(), chosen.before, *([runner.before] if runner else [])])
    blocks = [",".join([*before, "attention", "mlp"]) for before in locals_]
    words = " ".join(f'"{text}"' for text in depths)
    sequence = "" if len(blocks) == 1 else " --sequence " + " ".join(f'"{text}"' for text in blocks)
    return f"twoaxis compare --depth {words}{sequence} --seeds 3 --match flops --steps 1000 --out runs/settle"


def _runner_up(advice: Advice) -> Point | None:
    """The first candidate turned down, or the one that would come next."""
    from twoaxis.cost.fork import candidates

    chosen = advice.choice.point
    listed = candidates(advice.request.goal, advice.request.window)
    rest = [p for p in listed if p not in (chosen, Point())]
    return rest[0] if rest else None
