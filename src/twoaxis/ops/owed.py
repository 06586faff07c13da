"""What operators leave undone in backward for their sources to do, and what these sum up on the way: see `pulled`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Variable


class _Pass:
    """Notes of one backward pass. Autograd holds it as a callback of that pass, so that it ends with it, finished or
    interrupted; passes inside of others (a hook runs one) and in other threads have notes of their own."""

    def __init__(self) -> None:
        self.notes: dict[object, Any] = {}

    def __call__(self) -> None:
        """At the end of the pass."""
        self.notes.clear()


_passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()
_outside = _Pass()  # for those who sum up by themselves


def notes() -> dict[object, Any]:
    """What was noted in the present backward pass, by who notes it."""
    number = torch._C._current_graph_task_id()
    if number < 0:
        return _outside.notes
    found = _passes.get(number)
    if found is None:
        found = _passes[number] = _Pass()
        Variable._execution_engine.queue_callback(found)
    return found.notes


class Owed(ABC):
    """What one operator's backward left to its sources. A kind of operator is a subclass."""

    @classmethod
    @abstractmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[Self, int]]) -> list[Tensor]:
        """Parts, each (N, d), of the gradient of one source x (N, d), from all of this kind that a pass left to it.

        left: in the order of the forward pass, with the source's number among those of that operator. What else is
        owed with it, as gradients of parameters, goes to `Sums`. Runs without gradients and outside of autocast."""


class Sums:
    """Gradients of parameters, in `size` rows, as the sources add them up in one backward pass."""

    def __init__(self, size: int) -> None:
        self.size = size

    def add(self, rows: list[int], d: Tensor) -> None:
        """Add d (S, ...) to those S rows."""
        here = notes()
        if self not in here:
            here[self] = d.new_zeros(self.size, *d.shape[1:]), set()
        total, added = here[self]
        total.index_add_(0, torch.tensor(rows, device=d.device), d)
        added.update(rows)

    def take(self) -> tuple[Tensor, set[int]] | None:
        """What was added in the present pass, and to which rows."""
        found: tuple[Tensor, set[int]] | None = notes().pop(self, None)
        return found
