"""What crosses a boundary between blocks, by transport, from the arrays of a pass.

full      every array of the state, by name (one under two names counts twice)
window    those that later blocks read, each once
cached    those that the receiving rank has not seen, under a name that is one value at all depths, in an earlier
          stage of its own
push      sources of methods that can be summed ahead become one sum for each later reader, where these are fewer

These are the bytes that `parallel.plan_pipeline` plans (tests hold the two together, and the plan to what is sent). A
plan pushes from one link on; here each boundary is by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from twoaxis.cost.passes import traced
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.tape import Array, Tape

SUMS = ("static mix", "gated_mix")  # kernels whose weights no later layer makes


@dataclass(frozen=True, slots=True)
class Boundary:
    """After so many blocks: arrays of the state, and bytes by transport."""

    after: int
    tensors: int
    sent: dict[str, int]


def boundaries(
    cfg: ModelConfig,
    batch_size: int,
    seq_len: int,
    cuts: Sequence[int],
    ranks: int | None = None,
    dtype: str = "float32",
) -> list[Boundary]:
    """The boundaries of a pipeline of one micro-batch, cut after so many blocks each.

    cuts: increasing, 1 to L - 1. ranks: P; stage s runs on rank s mod P, None is one stage a rank. Raises
    InputError for cuts that are no such list and for methods that do not say what they do (no `trace`).
    """
    inside = list(cuts) == sorted(set(cuts)) and all(type(c) is int and 0 < c < cfg.n_blocks for c in cuts)
    if not inside or (ranks is not None and (type(ranks) is not int or not 1 <= ranks <= len(cuts) + 1)):
        raise InputError(
            f"cuts={list(cuts)}, ranks={ranks}: give increasing numbers of blocks, 1 to {cfg.n_blocks - 1}, "
            f"and 1 to {len(cuts) + 1} ranks"
        )
    t = traced(cfg, batch_size, seq_len, dtype)
    if t is None:
        raise InputError(
            f"what {cfg.depth} sends is not known from its options: {cfg.depth_config().untraced}"
        )
    pushes = cfg.depth_config().pushes
    return [
        Boundary(cut, len(set(t.boundaries[cut][1])), _sent(t, list(cuts), s, ranks, pushes))
        for s, cut in enumerate(cuts)
    ]


def largest(t: Tape, pushes: bool) -> dict[str, int]:
    """The largest boundary of a pass by transport, both ends of the network included. pushes: of the method."""
    uses = Uses(t)
    found = [_planned(t, uses, block, pushes) for block in range(len(t.boundaries))]
    return {name: max(one[name] for one in found) for name in ("full", "window", "push")}


class Uses:
    """Which kernels read each array: the last one, the last that is no sum, and all sums."""

    def __init__(self, t: Tape) -> None:
        self.last: dict[Array, int] = {}
        self.last_other: dict[Array, int] = {}
        self.sums: dict[Array, list[int]] = defaultdict(list)
        for number, kernel in enumerate(t.kernels):
            for x in kernel.inputs:
                root = x if x.base is None else x.root
                self.last[root] = number
                if kernel.name in SUMS:
                    self.sums[root].append(number)
                else:
                    self.last_other[root] = number

    def live(self, t: Tape, block: int) -> list[Array]:
        """The arrays of a state that later kernels read."""
        start = t.boundaries[block][0]
        return [x for x in _state(t, block) if self.last.get(x.root, -1) >= start]


def _sent(t: Tape, cuts: list[int], s: int, ranks: int | None, pushes: bool) -> dict[str, int]:
    seen: set[Array] = set()
    for earlier in range(s + 1 - ranks, -1, -ranks) if ranks else ():  # earlier stages of the receiving rank
        seen |= {*_lasting(t, cuts[earlier]), *_lasting(t, cuts[earlier - 1] if earlier else 0)}
    crossing = zip(t.boundaries[cuts[s]][1], t.lasting[cuts[s]], strict=True)
    new = [x for x, lasting in crossing if not (lasting and x in seen)]
    return {**_planned(t, Uses(t), cuts[s], pushes), "cached": _bytes(new)}


def _planned(t: Tape, uses: Uses, block: int, pushes: bool) -> dict[str, int]:
    live, start = uses.live(t, block), t.boundaries[block][0]
    full, window = _bytes(t.boundaries[block][1]), _bytes(live)
    if not pushes:
        return {"full": full, "window": window, "push": window}
    summed = [x for x in live if uses.last_other.get(x.root, -1) < start]
    later = {number for x in summed for number in uses.sums[x.root] if number >= start}
    sums = sum(x.nbytes for number in later for x in t.kernels[number].outputs)
    return {"full": full, "window": window, "push": window - _bytes(summed) + min(_bytes(summed), sums)}


def _lasting(t: Tape, block: int) -> list[Array]:
    """The arrays of a state that never change."""
    return [x for x, lasting in zip(t.boundaries[block][1], t.lasting[block], strict=True) if lasting]


def _state(t: Tape, block: int) -> list[Array]:
    return list(dict.fromkeys(t.boundaries[block][1]))


def _bytes(arrays: Sequence[Array]) -> int:
    return sum(x.nbytes for x in arrays)
