"""A rank's cache of depth: entries of the state that never change, kept for its later stages.

A later stage takes an entry as a new leaf and deposits the gradient; the stage that put it there adds all
deposits to its own gradient when its backward pass comes, which is after theirs. Tensors are handed over
detached: a graph is never walked twice.
"""

from __future__ import annotations

from torch import Tensor


class DepthCache:
    """Entries and gradients of the micro-batches that are under way on this rank."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str], Tensor] = {}
        self._gradients: dict[tuple[int, str], Tensor] = {}

    def put(self, micro: int, name: str, entry: Tensor) -> None:
        """Keep an entry."""
        self._entries[micro, name] = entry.detach()

    def take(self, micro: int, name: str, requires_grad: bool) -> Tensor:
        """The entry, as a leaf of its own."""
        return self._entries[micro, name].detach().requires_grad_(requires_grad)

    def deposit(self, micro: int, name: str, gradient: Tensor | None) -> None:
        """Add to the gradient of an entry."""
        if gradient is not None:
            before = self._gradients.get((micro, name))
            self._gradients[micro, name] = gradient if before is None else before + gradient

    def collect(self, micro: int, name: str) -> Tensor | None:
        """The sum of all deposits; frees the entry."""
        self._entries.pop((micro, name), None)
        return self._gradients.pop((micro, name), None)

    def clear(self) -> None:
        """Free everything."""
        self._entries.clear()
        self._gradients.clear()

    def __len__(self) -> int:
        return len(self._entries) + len(self._gradients)
