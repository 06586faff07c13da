"""Where a process's part of a tensor lies in the whole one: what checkpoints and gathering need to know."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """`length` indices of one dimension that lie together: from `whole` on in the whole tensor, from `here` on here."""

    whole: int
    here: int
    length: int


@dataclass(frozen=True)
class Placement:
    """The part of a tensor of `shape` that a process holds: for each dimension the runs that it has, in its order."""

    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Placement:
        """All of it."""
        return cls(tuple(shape), tuple((Run(0, 0, n),) for n in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    def cut(self, dim: int, pieces: list[tuple[int, int]]) -> Placement:
        """Of a whole dimension these (start, length) pieces, one after another."""
        here = itertools.accumulate((length for _, length in pieces), initial=0)
        runs = tuple(Run(start, at, length) for (start, length), at in zip(pieces, here, strict=False))
        return replace(self, runs=(*self.runs[:dim], runs, *self.runs[dim + 1 :]))

    def share(self, index: int, of: int) -> Placement:
        """The part of this part that process `index` of `of` holds: equal shares of the first dimension, the last less.

        That is how FSDP2 divides a parameter.
        """
        rows = self.local_shape[0]
        size = -(-rows // of)
        start = min(index * size, rows)
        stop = min(start + size, rows)
        kept = []
        for run in self.runs[0]:
            first, last = max(run.here, start), min(run.here + run.length, stop)
            if first < last:
                kept.append(Run(run.whole + first - run.here, first - start, last - first))
        return replace(self, runs=(tuple(kept), *self.runs[1:]))

    def pieces(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """(offsets in the whole, the part there) of every box of a local tensor; views of it."""
        for box in itertools.product(*self.runs):
            view = local
            for dim, run in enumerate(box):
                view = view.narrow(dim, run.here, run.length)
            yield tuple(run.whole for run in box), view

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, as a tensor of its own."""
        local = torch.empty(self.local_shape, dtype=whole.dtype, device=whole.device)
        for offsets, view in self.pieces(local):
            part = whole
            for dim, (start, length) in enumerate(zip(offsets, view.shape, strict=True)):
                part = part.narrow(dim, start, length)
            view.copy_(part)
        return local


def put(whole: Tensor, offsets: tuple[int, ...], piece: Tensor) -> None:
    """Write a piece into the whole tensor at its place."""
    for dim, (start, length) in enumerate(zip(offsets, piece.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    whole.copy_(piece)
