"""Earlier layers as a value: an immutable tuple of sources with the depth at which each was pushed.

A history is a pytree of tensors, so it can be checkpointed, compiled, sent and counted like any state. It is
never stacked: stacking n sources of (B, T, d) at every read would cost O(L^2) memory over L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from twoaxis.types import TensorSpec


@dataclass(frozen=True)
class History:
    """sources: tensors (B, T, d), oldest first. index: the depth index of each; index 0 is the embeddings."""

    sources: tuple[Tensor, ...] = ()
    index: tuple[int, ...] = ()

    def push(self, source: Tensor, index: int) -> History:
        """The history with one more source."""
        return History((*self.sources, source), (*self.index, index))

    def keep(self, wanted: Callable[[int], bool]) -> History:
        """Only the sources whose depth index is wanted."""
        pairs = [(s, i) for s, i in zip(self.sources, self.index, strict=True) if wanted(i)]
        return History(tuple(s for s, _ in pairs), tuple(i for _, i in pairs))

    def last(self, count: int) -> History:
        """The newest `count` sources."""
        return History(self.sources[-count:], self.index[-count:]) if count else History()

    def __len__(self) -> int:
        return len(self.sources)


def _flatten(history: History) -> tuple[list[Any], tuple[int, ...]]:
    return list(history.sources), history.index


def _flatten_with_keys(history: History) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    keys: list[Any] = [pytree.MappingKey(f"source.{i}") for i in history.index]
    return list(zip(keys, history.sources, strict=True)), history.index


def _unflatten(sources: Any, index: Any) -> History:
    return History(tuple(sources), tuple(index))


pytree.register_pytree_node(
    History,
    _flatten,
    _unflatten,
    serialized_type_name="twoaxis.depth.history.History",
    flatten_with_keys_fn=_flatten_with_keys,
)


def named_tensors(state: Any) -> dict[str, Tensor]:
    """The tensors of a state by name: "stream" for a bare tensor, else the path, e.g. "history.source.3"."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) or "stream": leaf
        for path, leaf in leaves
    }


def source_specs(field: str, index: Iterable[int], spec: TensorSpec) -> dict[str, TensorSpec]:
    """What `named_tensors` will call the sources of a history stored under `field`, each like `spec`."""
    return {f"{field}.source.{i}": spec for i in index}


def largest_boundary(state_spec: Callable[[int], dict[str, TensorSpec]], n_blocks: int) -> int:
    """Bytes of the largest state at a block boundary, ends included; `state_spec` takes the blocks run."""
    return max(sum(t.nbytes for t in state_spec(depth).values()) for depth in range(n_blocks + 1))
