"""What a comparison rests on and what it lacks, in words."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from twoaxis.study.budgets import NAMED, SAID, TOLERANCE
from twoaxis.study.grid import Study
from twoaxis.study.statistics import ENOUGH_SEEDS
from twoaxis.study.units import duration

HOW = {
    "width": "All models have the same width and depth, whatever that costs them",
    "parameters": "MLP widths were changed until the parameters meet the baseline's",
    "flops": "MLP widths were changed until the FLOPs per token meet the baseline's",
}


def matched_words(study: Study) -> str:
    """What all rows share, and which budget the verdicts rest on."""
    named = " and ".join(SAID[name] for name in NAMED[study.match])
    apart = [row.name for row in study.rows if row.train]
    but = f", but for the settings of {', '.join(apart)}" if apart else ""
    return (
        "Every row saw the same number of tokens of the same data in the same order, under the same settings "
        f"(learning rate included){but}; one setting was tried per row. {HOW[study.match]}. "
        f"A row is ranked only if it agrees with the baseline in {named}, within {TOLERANCE:.0%}."
    )


def advice(study: Study, runs: list[dict[str, Any]]) -> str:
    """What more seeds would add, with the time they would take here; empty when there are enough."""
    missing = ENOUGH_SEEDS - len(study.seeds)
    if missing <= 0:
        return ""
    seconds = [run["seconds"] for run in runs if run["seconds"]]
    work = fmean(seconds) * missing * len(study.rows) if seconds else 0
    time = f"about {duration(work)} of training here; " if work else ""
    have, more = ("One seed", "two more orders") if missing == 2 else ("Two seeds", "one more order")
    return (
        f"{have} cannot tell a method from luck, so nothing is ranked. --seeds {ENOUGH_SEEDS} trains every "
        f"row on {more} of the data and starts of the weights ({time}finished runs are kept), and adds the "
        "spread over seeds, the difference to the baseline on the same seeds with its 95% interval, and a "
        "verdict corrected for the number of comparisons."
    )
