"""The orders in which the ranks of a pipeline run their micro-batches, and what follows from them.

    gpipe         every forward pass, then every backward pass (arXiv 1811.06965); with several stages per rank stage
                  by stage, backward from the last micro-batch on (arXiv 2211.05953)
    1f1b          P - s forward passes on rank s, then one backward and one forward in turn (arXiv 2006.09503)
    interleaved   the same over V stages per rank, in rounds of about P micro-batches (arXiv 2104.04473)

Stage s runs on rank s mod P. These are the orders of torch.distributed.pipelining, which runs them; tests hold them to
what a real pipeline does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Order = Literal["gpipe", "1f1b", "interleaved"]


class Action(NamedTuple):
    """One pass of a micro-batch over a stage: "F" forward or "B" backward."""

    way: Literal["F", "B"]
    stage: int
    micro: int


def actions(schedule: Order, n_ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does, in order."""
    one = {"gpipe": _gpipe, "1f1b": _one_by_one, "interleaved": _interleaved}[schedule]
    return [one(rank, n_ranks, virtual, micro_batches) for rank in range(n_ranks)]


def _gpipe(rank: int, n_ranks: int, virtual: int, m: int) -> list[Action]:
    stages = [rank + n_ranks * v for v in range(virtual)]
    back = range(m) if virtual == 1 else range(m - 1, -1, -1)
    ahead = [Action("F", stage, i) for stage in stages for i in range(m)]
    return ahead + [Action("B", stage, i) for stage in reversed(stages) for i in back]


def _one_by_one(rank: int, n_ranks: int, virtual: int, m: int) -> list[Action]:
    return _in_turn(
        ahead=[Action("F", rank, i) for i in range(m)],
        back=[Action("B", rank, i) for i in range(m)],
        lead=min(m, n_ranks - rank) - 1,
    )


def _interleaved(rank: int, n_ranks: int, virtual: int, m: int) -> list[Action]:
    size = m // max(1, m // n_ranks)  # micro-batches of a round
    rounds = [range(start, start + size) for start in range(0, m, size)]
    stages = [rank + n_ranks * v for v in range(virtual)]
    return _in_turn(
        ahead=[Action("F", stage, i) for one in rounds for stage in stages for i in one],
        back=[Action("B", stage, i) for one in rounds for stage in reversed(stages) for i in one],
        lead=min((virtual - 1) * size + 2 * (n_ranks - 1 - rank), virtual * m),
    )


def _in_turn(ahead: list[Action], back: list[Action], lead: int) -> list[Action]:
    """`lead` forward passes, then a forward and a backward pass in turn, then the backward passes left."""
    steady = [action for pair in zip(ahead[lead:], back, strict=False) for action in pair]
    return [*ahead[:lead], *steady, *back[len(ahead) - lead :]]


def peak(order: Sequence[Action], weight: Sequence[float] | None = None) -> tuple[int, ...]:
    """How many micro-batches each stage of a rank holds, gone forward and not backward, when the rank holds most.

    weight: by stage, what one of them holds there; without it all count alike. The result is by stage, 0 for stages
    of other ranks.
    """
    n_stages = max((action.stage for action in order), default=-1) + 1
    held, best, most = [0] * n_stages, (0,) * n_stages, 0.0
    for action in order:
        held[action.stage] += 1 if action.way == "F" else -1
        total = float(sum(held)) if weight is None else sum(n * w for n, w in zip(held, weight, strict=False))
        if total > most:
            best, most = tuple(held), total
    return best
