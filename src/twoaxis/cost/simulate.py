"""A pipeline's step in time: each rank runs its order, each pass starts when its input has come.

    start(F, s, i) = max(rank is free, end(F, s-1, i) + link)       end = start + forward_s
    start(B, s, i) = max(rank is free, end(B, s+1, i) + link)       end = start + backward_s

A message occupies its link in one direction, first come first served, and no rank waits for what it sends. With equal
stages and links that take no time every schedule's bubble is (P - 1) / (V m + P - 1), if m is a multiple of P for
V > 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twoaxis.cost.schedules import Action, Order, actions, peak


@dataclass(frozen=True)
class Timeline:
    """A simulated step. seconds: from the first pass to the last. busy: by rank. starts: of every pass.

    orders: by rank. live: by rank, the most micro-batches under way at once, each stage's counted.
    """

    seconds: float
    busy: tuple[float, ...]
    orders: tuple[tuple[Action, ...], ...]
    starts: dict[Action, float]
    live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate(
    schedule: Order,
    n_ranks: int,
    virtual: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    links: Sequence[float] = (),
) -> Timeline:
    """Run a schedule. forward, backward: seconds of one micro-batch by stage, P V of them; links: seconds over each
    of the P V - 1 links, one way; none is no time."""
    orders = actions(schedule, n_ranks, virtual, micro_batches)
    last = n_ranks * virtual - 1
    starts: dict[Action, float] = {}
    arrived: dict[Action, float] = {}  # when the input of a pass has come from the stage before it
    free, sent = [0.0] * n_ranks, dict[tuple[int, int], float]()
    done = [0] * n_ranks
    while sum(done) < sum(map(len, orders)):
        before = list(done)
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                action = order[done[rank]]
                if action.stage != (0 if action.way == "F" else last) and action not in arrived:
                    break
                starts[action] = max(free[rank], arrived.get(action, 0.0))
                took = (forward if action.way == "F" else backward)[action.stage]
                free[rank] = starts[action] + took
                done[rank] += 1
                _send(action, free[rank], last, n_ranks, links, sent, arrived)
        assert done != before, f"{schedule}: every rank waits for another"
    ways = {"F": forward, "B": backward}
    busy = tuple(sum(ways[a.way][a.stage] for a in order) for order in orders)
    return Timeline(
        seconds=max(free),
        busy=busy,
        orders=tuple(map(tuple, orders)),
        starts=starts,
        live=tuple(sum(peak(order)) for order in orders),
    )


def _send(
    action: Action,
    end: float,
    last: int,
    n_ranks: int,
    links: Sequence[float],
    sent: dict[tuple[int, int], float],
    arrived: dict[Action, float],
) -> None:
    """Put what a pass has made on its link."""
    there = action.stage + (1 if action.way == "F" else -1)
    if not 0 <= there <= last:
        return
    seconds = links[min(action.stage, there)] if links else 0.0
    wire = (action.stage % n_ranks, there % n_ranks)
    sent[wire] = max(end, sent.get(wire, 0.0)) + seconds
    arrived[action._replace(stage=there)] = sent[wire]
