"""Counts what is really sent: the tensors handed to torch.distributed, by link and direction."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

Direction = Literal["forward", "backward"]


class Wire:
    """Bytes and tensors that this rank sent, since it was made or cleared."""

    def __init__(self) -> None:
        self.nbytes: Counter[tuple[int, Direction]] = Counter()
        self.tensors: Counter[tuple[int, Direction]] = Counter()

    def count(self, link: int, direction: Direction, operations: list[Any]) -> None:
        """Add the sends of a list of point-to-point operations over `link`."""
        for op in operations:
            self.nbytes[link, direction] += op.tensor.numel() * op.tensor.element_size()
            self.tensors[link, direction] += 1

    def clear(self) -> None:
        """Start again."""
        self.nbytes.clear()
        self.tensors.clear()
