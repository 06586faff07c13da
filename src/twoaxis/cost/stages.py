"""What a stage of a pipeline keeps of one micro-batch between its passes, from the arrays of a pass.

Kept are the tensors that operators save, and the state where it enters and leaves the stage: the engine holds both
until the backward pass. With recomputation it is less, see `kept`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from twoaxis.tape import Array, Kernel, Tape

Saved = Literal["all", "blocks", "cores", "host"]  # as in `model/saving.py`


@dataclass(frozen=True)
class Kept:
    """The arrays that one stage keeps. state: those that are part of the state at a block boundary.

    again: more, while the largest part is recomputed, or brought back from the host. host: what is kept there.
    """

    arrays: frozenset[Array]
    state: frozenset[Array]
    again: frozenset[Array] = frozenset()
    host: frozenset[Array] = frozenset()


def kept(
    t: Tape,
    blocks: range,
    first: bool = True,
    last: bool = True,
    saved: Saved = "all",
    every: int = 1,
    absent: frozenset[Array] = frozenset(),
    hands_on: bool = True,
    loop: bool = False,
) -> Kept:
    """What the stage that runs `blocks` keeps. first, last: whether it has the network's ends (another stage may have
    no block at all).

    absent: arrays of the entering state in whose place it gets something else. hands_on: whether the state that
    leaves is itself what is sent. loop: whether this is the decoder's own loop, in which some states are made again
    (`ops/rebuilt.py`). saved: of every `every`-th block nothing but its input is kept ("blocks"), or of
    its cores nothing but theirs ("cores": the depth reads and writes are kept).
    """
    starts = [start for start, _ in t.boundaries]
    begin, end = _ends(t, blocks, first, last)
    kernels = [k for k in t.kernels[begin:end] if (k.part, k.name) != ("head", "mean")]  # see Pipeline._loss
    entered = set() if first else {x.root for x in t.boundaries[blocks.start][1]} - absent
    left = [x.root for x in t.boundaries[blocks.stop][1]] if hands_on and not last else []
    found, again = set[Array](), set[Array]()
    ends = [
        *(t.kernels[: starts[0]] if first else ()),
        *(kernels[starts[-1] - begin :] if last else ()),
    ]
    found.update(_saved(ends, loop))
    for block in blocks:
        inside = t.kernels[starts[block] : starts[block + 1]]
        parts = [inside] if saved == "blocks" else list(_cores(inside)) if saved == "cores" else []
        parts = [] if block % every else parts
        remade = {k for part in parts for k in part}
        kept_here = set(_saved([k for k in inside if k not in remade], loop))
        for part in parts:
            own = {x.root for k in part for x in k.outputs}
            kept_here.update(x.root for k in part for x in k.held)
            read = {x.root for x in t.boundaries[block][1]}
            if saved == "cores":
                read = {x.root for k in part for x in k.inputs}
            kept_here.update(x for x in read if x not in own and not x.parameter)
        found |= kept_here
        again = max([again, *(set(_saved(part, loop)) - found for part in parts)], key=_nbytes)
    states = {x.root for _, state in t.boundaries[blocks.start : blocks.stop + 1] for x in state}
    host = set[Array]()
    if saved == "host":
        held = {x.root for k in kernels for x in k.held}
        host = {x for x in found if x not in held and not _integers(x)}
        found -= host
        again = max(
            (host & set(_saved(t.kernels[starts[b] : starts[b + 1]], loop)) for b in blocks), key=_nbytes
        )
    others = (*t.kernels[:begin], *t.kernels[end:])
    elsewhere = {x.root for k in others for x in k.outputs}.difference(entered)
    arrays = {x for x in (*found, *entered, *left) if x not in elsewhere}
    return Kept(frozenset(arrays), frozenset(arrays & states), frozenset(again), frozenset(host - elsewhere))


def stage_pass(t: Tape, blocks: range, first: bool = True, last: bool = True) -> Tape:
    """The part of a pass that the stage of `blocks` runs."""
    begin, end = _ends(t, blocks, first, last)
    return replace(t, kernels=t.kernels[begin:end], boundaries=[(end - begin, t.boundaries[blocks.stop][1])])


def sliced(t: Tape, kinds: frozenset[str]) -> frozenset[Array]:
    """The arrays inside cores of these kinds, of which each slice of tensors has its part: all but what enters
    a core and what it puts out, and all but angles and masks, which every slice has."""
    readers: dict[Array, set[str]] = defaultdict(set)
    for kernel in t.kernels:
        for x in kernel.inputs:
            readers[x.root].add(kernel.part)
    made = {x.root: k.part for k in t.kernels if k.part in kinds for x in (*k.outputs, *k.held)}
    return frozenset(x for x, part in made.items() if readers[x] <= {part} and not x.constant)


def _ends(t: Tape, blocks: range, first: bool, last: bool) -> tuple[int, int]:
    """The first kernel of a stage, and the first one after it."""
    begin = 0 if first else t.boundaries[blocks.start][0]
    return begin, len(t.kernels) if last else t.boundaries[blocks.stop][0]


def _saved(kernels: list[Kernel], loop: bool) -> Iterator[Array]:
    every = (x.root for k in kernels for x in (*k.keep, *k.held, *(k.looped if loop else k.rebuilt)))
    return (x for x in every if not x.parameter)


def _integers(x: Array) -> bool:
    """Token ids, indices, masks: they stay on the device."""
    return x.constant and x.itemsize in (1, 8)


def _cores(kernels: list[Kernel]) -> Iterator[list[Kernel]]:
    """Runs of kernels that belong to cores, or to the pieces of them that a depth method calls."""
    run: list[Kernel] = []
    for kernel in kernels:
        if run and (kernel.part, kernel.piece) != (run[-1].part, run[-1].piece):
            yield run
            run = []
        if kernel.part != "depth":
            run.append(kernel)
    if run:
        yield run


def _nbytes(arrays: set[Array]) -> int:
    return sum(x.nbytes for x in arrays)
