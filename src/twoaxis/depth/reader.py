"""A read whose weight depends only on the reader and the source, so that sources can be added up ahead of it.

pull:  z_n = sum_{j <= n} W_{n,j} X_j                 the sources travel to their readers
push:  S_n = sum_{j <= m} W_{n,j} X_j  at depth m,    one sum per reader travels instead of the sources,
       z_n = S_n + sum_{m < j <= n} W_{n,j} X_j       up to the order of additions

Both are exact. A state in the push form keeps its `History` and holds the sums in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from twoaxis.depth.history import History


class Reader(ABC):
    """A connection, or a stream, that reads such sums of the state's `History` called "sources".

    Set `number`: the block in which it reads, L for a stream, None where it does not read.
    """

    weights: ClassVar[str]  # the parameter, or the module, that holds W_n
    number: int | None = None
    n_wanted: int | None = None  # of a windowed read: so many sources without sums are all that it wants

    def wants(self, index: int) -> bool:
        """Whether it reads the source of this depth index: every one by default."""
        return True

    @abstractmethod
    def weigh(self, sources: History) -> tuple[Tensor, ...]:
        """sum_j W_{n,j} X_j over these sources alone, all of them wanted: one (B, T, d) for each read."""

    def mixtures(self, sources: History) -> tuple[Tensor, ...]:
        """Its reads z_n of a history in either form."""
        if not sources.sums and len(sources) == self.n_wanted:  # without numbers that differ in every block
            return self.weigh(sources)
        sums = () if self.number is None else sources.sums_of(self.number)
        wanted = sources.keep(self.wants)
        if not sums or not len(wanted):
            return sums or self.weigh(wanted)
        return tuple(s + z for s, z in zip(sums, self.weigh(wanted), strict=True))


def summed(sources: History, readers: list[Reader], loose: frozenset[int]) -> History:
    """The push form of `sources` for the readers still to come; `loose` are sources kept as they are."""
    sums: list[Tensor] = []
    keys: list[tuple[int, int]] = []
    for reader in readers:
        assert reader.number is not None
        if sources.sums_of(reader.number) or len(sources.keep(reader.wants)):
            found = reader.mixtures(sources)
            sums += found
            keys += [(reader.number, way) for way in range(len(found))]
    return replace(sources.keep(loose.__contains__), sums=tuple(sums), readers=tuple(keys))
