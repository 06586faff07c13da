"""What operators leave undone in backward for their sources to do, and what these sum up on the way: see `pulled`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor


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
        self.total: tuple[int, Tensor, set[int]] | None = None  # the pass, the sums, rows that were added to

    def add(self, rows: list[int], d: Tensor) -> None:
        """Add d (S, ...) to those S rows."""
        now = torch._C._current_graph_task_id()
        if self.total is None or self.total[0] != now:
            self.total = now, d.new_zeros(self.size, *d.shape[1:]), set()
        self.total[1].index_add_(0, torch.tensor(rows, device=d.device), d)
        self.total[2].update(rows)

    def take(self) -> tuple[Tensor, set[int]] | None:
        """What was added in the present pass, and to which rows."""
        total, self.total = self.total, None
        return total[1:] if total is not None and total[0] == torch._C._current_graph_task_id() else None
