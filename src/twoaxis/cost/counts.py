"""From the kernels on a tape to the counts of `Cost`, by part."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from twoaxis.cost.fused import fused
from twoaxis.tape import Array, Kernel, Tape

NOTHING = dict.fromkeys(
    (
        *("flops_forward", "flops_backward", "saved_bytes", "saved_bytes_checkpointed"),
        *("bytes_forward", "bytes_backward", "bytes_eager_forward", "bytes_eager_backward"),
        *("launches_forward", "launches_backward", "launches_fused_forward", "launches_fused_backward"),
    ),
    0,
)  # what a part that runs nothing counts
Counts = dict[str, Counter[str]]  # part -> field of Cost -> number


def counts(t: Tape) -> Counts:
    """FLOPs, bytes moved, launches and saved bytes of every part."""
    found: Counts = defaultdict(Counter)
    for kernel in t.kernels:
        found[kernel.part] += Counter(
            flops_forward=kernel.flops,
            flops_backward=kernel.flops * kernel.back,
            launches_forward=kernel.launches,
            bytes_eager_forward=_moved(kernel),
        )
    for one in fused(t):
        found[one.part] += Counter(
            bytes_forward=one.bytes_forward,
            bytes_backward=one.bytes_backward,
            launches_fused_forward=1,
            launches_fused_backward=1 + one.product,
        )
    for part, (launches, moved) in _backward(t).items():
        found[part] += Counter(launches_backward=launches, bytes_eager_backward=moved)
    for x, part in t.saved().items():
        found[part]["saved_bytes"] += x.nbytes
    for x, part in checkpointed(t).items():
        found[part]["saved_bytes_checkpointed"] += x.nbytes
    return found


def checkpointed(t: Tape) -> dict[Array, str]:
    """What stays from forward to backward when every block is recomputed: block inputs, and the two ends."""
    first, last = t.boundaries[0][0], t.boundaries[-1][0]
    kept = {**t.saved(last), **t.saved(0, first)}
    for kernel in t.kernels[first:last]:
        kept |= dict.fromkeys(kernel.held, kernel.part)
    for _, state in t.boundaries[:-1]:
        for x in state:
            kept.setdefault(x.root, "depth")
    return kept


def recomputed_bytes(t: Tape) -> int:
    """What the largest block saves beside that while it is recomputed."""
    held, starts = checkpointed(t), [start for start, _ in t.boundaries]
    blocks = [t.saved(a, b) for a, b in pairwise(starts)]
    return max(sum(x.nbytes for x in block if x not in held) for block in blocks)


def _moved(kernel: Kernel) -> int:
    if kernel.moved is not None:
        return kernel.moved
    return sum(x.nbytes for x in (*kernel.inputs, *kernel.outputs))


def _backward(t: Tape) -> dict[str, tuple[int, int]]:
    """(launches, bytes) of autograd by part: every kernel reads its result's gradient and what it kept, and
    writes a gradient for each input that has one; an addition passes its gradient on; sums take one more.
    """
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    reached: set[Array] = set()
    for kernel in reversed(t.kernels):
        inputs = [x for x in kernel.inputs if not x.constant]
        grad = sum(x.nbytes for x in kernel.outputs[:1])
        launches = moved = 0
        if kernel.name != "add":
            written = sum(x.nbytes for x in inputs)
            launches = len(inputs) if kernel.product else min(len(inputs), kernel.launches)
            moved = grad * max(1, launches) + sum(x.nbytes for x in kernel.keep) + written
        for x in inputs:
            if x in reached:
                launches, moved = launches + 1, moved + 3 * x.nbytes
            reached.add(x)
        before = found[kernel.part]
        found[kernel.part] = (before[0] + launches, before[1] + moved)
    return dict(found)
