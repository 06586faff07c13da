"""From the kernels on a tape to the counts of `Cost`, by part."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from twoaxis.cost.works import Execution, works
from twoaxis.tape import Array, Tape

NOTHING = dict.fromkeys(
    (
        *("flops_forward", "flops_backward", "saved_bytes", "saved_bytes_checkpointed"),
        *("bytes_forward", "bytes_backward", "bytes_eager_forward", "bytes_eager_backward"),
        *("launches_forward", "launches_backward", "launches_fused_forward", "launches_fused_backward"),
    ),
    0,
)  # what a part that runs nothing counts
EXECUTIONS: tuple[tuple[Execution, str, str], ...] = (
    ("eager", "bytes_eager", "launches"),
    ("fused", "bytes", "launches_fused"),
)
Counts = dict[str, Counter[str]]  # part -> field of Cost -> number


def counts(t: Tape) -> Counts:
    """FLOPs, bytes moved, launches and saved bytes of every part."""
    found: Counts = defaultdict(Counter)
    for execution, moved, launched in EXECUTIONS:
        for way, todo in zip(("forward", "backward"), works(t, execution), strict=True):
            for work in todo:
                one = found[work.part]
                one[f"{moved}_{way}"] += work.nbytes
                one[f"{launched}_{way}"] += work.launches
                one[f"flops_{way}"] += work.flops if execution == "eager" else 0
    for x, part in kept(t).items():
        found[part]["saved_bytes"] += x.nbytes
    for x, part in checkpointed(t).items():
        found[part]["saved_bytes_checkpointed"] += x.nbytes
    return found


def kept(t: Tape) -> dict[Array, str]:
    """What stays from forward to backward: all that kernels save, or of a network that runs again its input."""
    if t.again is None or t.entry is None:
        return t.saved()
    first, last = t.again
    return {**_around(t, first, last), t.entry.root: "depth"}


def checkpointed(t: Tape) -> dict[Array, str]:
    """The same when every block is recomputed: block inputs, and the two ends.

    Of a network that runs again as well torch keeps both, its own input and the blocks'.
    """
    found = kept(t) if t.again else _around(t, t.boundaries[0][0], t.boundaries[-1][0])
    for _, state in t.boundaries[:-1]:
        for x in state:
            found.setdefault(x.root, "depth")
    return found


def recomputed_bytes(t: Tape) -> int:
    """What the largest block saves beside that while it is recomputed; of a network that runs again also what is
    saved before its first block and after its last."""
    held, starts = checkpointed(t), [start for start, _ in t.boundaries]
    there = set(_around(t, starts[0], starts[-1])) if t.again else set()
    blocks = [t.saved(a, b, alone=True) for a, b in pairwise(starts)]
    return max(sum(x.nbytes for x in there.union(block) if x not in held) for block in blocks)


def _around(t: Tape, first: int, last: int) -> dict[Array, str]:
    """What kernels before `first` and from `last` on save, and what those between hold all the same."""
    found = {**t.saved(last, alone=True), **t.saved(0, first, alone=True)}
    for kernel in t.kernels[first:last]:
        found |= dict.fromkeys(kernel.held, kernel.part)
    return found
