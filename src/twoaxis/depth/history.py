"""Earlier layers as a value: an immutable tuple of sources with the depth at which each was pushed.

A history is a pytree of tensors, so it can be checkpointed, compiled, sent and counted like any state. It is
never stacked: stacking n sources of (B, T, d) at every read would cost O(L^2) memory over L layers.

It may keep its sources in fewer bits (`stored.py`), chosen by the model's `history`. What a method carries on as its
stream is not rounded: a source pushed with `carried` stays as it is until the next push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from twoaxis.depth.history_spec import parse_history
from twoaxis.depth.stored import plain_parts, store
from twoaxis.errors import InputError
from twoaxis.types import Layout, TensorSpec

Readers = tuple[tuple[int, int], ...]
Kept = tuple[tuple[int, ...], str, bool, Readers]  # what is not a tensor: index, dtype, carried, readers


@dataclass(frozen=True)
class History:
    """sources: tensors (B, T, d), oldest first. index: the depth index of each; index 0 is the embeddings.
    dtype: that sources are kept in, "full" is their own. carried: the newest is also the stream, kept as it is.
    sums: what earlier sources, no longer here, add to reads still to come; readers: whose they are, the number
    of the reader and which of its reads (see `reader.py`). Only a pipeline puts any there.
    """

    sources: tuple[Tensor, ...] = ()
    index: tuple[int, ...] = ()
    dtype: str = "full"
    carried: bool = False
    sums: tuple[Tensor, ...] = ()
    readers: Readers = ()

    @classmethod
    def empty(cls, layout: Layout) -> History:
        """The history of a model before anything is pushed."""
        return cls(dtype=parse_history(layout.history).dtype)

    def push(self, source: Tensor, index: int | None = None, carried: bool = False) -> History:
        """The history with one more source, and the one that was carried as far kept like the others.

        index: by default the next; a number of the block's own would make torch compile every block anew.
        """
        index = (self.index[-1] + 1 if self.index else 0) if index is None else index
        sources = self.sources
        if self.carried:
            sources = (*sources[:-1], self.stored(sources[-1]))
        newest = source if carried else self.stored(source)
        return self.made((*sources, newest), (*self.index, index), carried and self.dtype != "full")

    def stored(self, source: Tensor) -> Tensor:
        """A source as it is kept."""
        return store(source, self.dtype)

    def made(self, sources: tuple[Tensor, ...], index: tuple[int, ...], carried: bool) -> History:
        """The same with other sources."""
        return History(sources, index, self.dtype, carried, self.sums, self.readers)

    def keep(self, wanted: Callable[[int], bool]) -> History:
        """Only the sources whose depth index is wanted."""
        pairs = [(s, i) for s, i in zip(self.sources, self.index, strict=True) if wanted(i)]
        if len(pairs) == len(self.index):
            return self
        carried = self.carried and bool(pairs) and pairs[-1][1] == self.index[-1]
        return replace(
            self, sources=tuple(s for s, _ in pairs), index=tuple(i for _, i in pairs), carried=carried
        )

    def without(self, places: range) -> History:
        """Only the sources outside `places`, which are one after the other."""
        if not places:
            return self
        start, stop = places.start, places.stop
        sources, index = self.sources, self.index
        carried = self.carried and stop < len(index)
        return self.made(sources[:start] + sources[stop:], index[:start] + index[stop:], carried)

    def last(self, count: int, sink: int = 0) -> History:
        """The newest `count` sources, or `count` of which the oldest `sink` are among."""
        return self.without(range(sink, sink + len(self.sources) - count))

    def sums_of(self, number: int) -> tuple[Tensor, ...]:
        """What earlier sources add to the reads of one reader; empty if nothing was summed for it."""
        return tuple(t for t, (reader, _) in zip(self.sums, self.readers, strict=True) if reader == number)

    def __len__(self) -> int:
        return len(self.sources)

    def names(self) -> list[str]:
        """Of the sources and sums in a state."""
        names = [f"source.{i}" for i in self.index]
        names = [*names[:-1], "newest"] if self.carried else names
        return names + [f"sum.{number}.way.{way}" for number, way in self.readers]


def _flatten(history: History) -> tuple[list[Any], Kept]:
    kept = (history.index, history.dtype, history.carried, history.readers)
    return [*history.sources, *history.sums], kept


def _flatten_with_keys(history: History) -> tuple[list[tuple[Any, Any]], Kept]:
    keys: list[Any] = [pytree.MappingKey(name) for name in history.names()]
    tensors, kept = _flatten(history)
    return list(zip(keys, tensors, strict=True)), kept


def _unflatten(tensors: Any, kept: Any) -> History:
    index, dtype, carried, readers = kept
    every = tuple(tensors)
    return History(every[: len(index)], tuple(index), dtype, carried, every[len(index) :], readers)


pytree.register_pytree_node(
    History,
    _flatten,
    _unflatten,
    serialized_type_name="twoaxis.depth.history.History",
    flatten_with_keys_fn=_flatten_with_keys,
)


def unchanging(name: str) -> bool:
    """Whether a name in a state is one value at all depths: those that end in a number are."""
    return name.rpartition(".")[2].isdigit()


def newest(count: int, window: int | None) -> range:
    """Which of `count` sources a read sees through a window of so many, None of all."""
    return range(0 if window is None else max(0, count - window), count)


def check_window(method: str, option: str, window: int | None) -> None:
    """Refuse a window that sees nothing."""
    if window is not None and window < 1:
        raise InputError(f"{method}({option}={window}): allowed is 1 or more, or None for all")


def named_tensors(state: Any) -> dict[str, Tensor]:
    """The plain tensors of a state by name: "stream" for a bare tensor, else the path, e.g. "history.source.3", to
    which a source kept as int8 adds its scales, "history.source.3.scale"."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {
        (".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) or "stream") + end: part
        for path, leaf in leaves
        for end, part in plain_parts(leaf).items()
    }


def source_specs(
    field: str, index: Iterable[int], spec: TensorSpec, layout: Layout, carried: bool = False
) -> dict[str, TensorSpec]:
    """What `named_tensors` will call the sources of a history stored under `field`, each like `spec` as it is pushed;
    carried: the last of them is also the stream."""
    dtype, names = parse_history(layout.history).dtype, [f"{field}.source.{i}" for i in index]
    if dtype == "full":
        return dict.fromkeys(names, spec)
    exact = {f"{field}.newest": spec} if carried else {}
    specs = {}
    for name in names[:-1] if carried else names:
        specs[name] = replace(spec, dtype=dtype)
        if dtype == "int8":
            ones = (1,) * len(spec.shape[2:])
            scale = "float64" if spec.dtype == "float64" else "float32"
            specs[f"{name}.scale"] = TensorSpec((*spec.shape[:2], *ones), scale)
    return {**specs, **exact}
