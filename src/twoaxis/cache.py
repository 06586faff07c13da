"""Memory over tokens for decoding: one slot per module that needs one, all with the same five verbs.

A slot keeps the newest rows of some named tensors, (B, rows, ...), in a ring. Its `length` counts every
token it has seen and is not the number of rows it still holds. Appending returns the rows a module needs
from before together with ALL new rows, in age order, and drops old rows only afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from twoaxis.errors import InputError


class Slot:
    """Rows of named tensors over tokens.

    fields: name -> (shape of one row without batch, dtype). keep: how many rows from before a new token are
    read (window - 1, kernel - 1; None: all of them). max_rollback: how many tokens can be taken back once
    the ring has wrapped. max_length: rows to hold when keep is None (None: grows as needed).
    """

    def __init__(
        self,
        batch_size: int,
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        keep: int | None,
        max_rollback: int = 0,
        max_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.keep, self.fixed = keep, keep is not None or max_length is not None
        rows = keep + 1 + max_rollback if keep is not None else (max_length or 0)
        self.length = 0  # tokens seen
        self._high = 0  # largest length ever: rows older than _high - rows are overwritten
        self._data = {
            name: torch.zeros(batch_size, rows, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in fields.items()
        }

    @property
    def rows(self) -> int:
        """Rows held at most."""
        return next(iter(self._data.values())).shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.numel() * t.element_size() for t in self._data.values())

    def append(self, **new: Tensor) -> dict[str, Tensor]:
        """Store new rows (B, T, ...); return the kept rows before them and the new ones, oldest first."""
        count = next(iter(new.values())).shape[1]
        self._grow(self.length + count)
        before = self.length if self.keep is None else min(self.length, self.keep)
        old = self._index(self.length - before, self.length)
        joined = {
            name: torch.cat((self._data[name][:, old].to(x.dtype), x), 1) if before else x
            for name, x in new.items()
        }
        stored = min(count, self.rows)
        end = self.length + count
        where = self._index(end - stored, end)
        for name, x in new.items():
            self._data[name][:, where] = x[:, count - stored :].detach().to(self._data[name].dtype)
        self.length, self._high = end, max(self._high, end)
        return joined

    def newest(self) -> dict[str, Tensor]:
        """The newest row of every field, (B, 1, ...)."""
        where = self._index(self.length - 1, self.length)
        return {name: data[:, where] for name, data in self._data.items()}

    def check_rollback(self, length: int) -> None:
        """Refuse a rollback to `length` tokens when rows it needs are gone."""
        if not 0 <= length <= self.length:
            raise InputError(
                f"truncate_to({length}): the cache has seen {self.length} tokens; give 0 to {self.length}"
            )
        oldest = 0 if self.keep is None or length == 0 else max(0, length - self.keep)
        if length and oldest < self._high - self.rows:
            back = self.length - length
            raise InputError(
                f"cannot take back {back} of {self.length} tokens: rows from {oldest} on are needed and the window "
                f"holds them from {self._high - self.rows}; make the cache with max_rollback of at least {back}"
            )

    def truncate_to(self, length: int) -> None:
        """Forget every token from position `length` on; refused when rows it needs are gone."""
        self.check_rollback(length)
        self.length = length
        self._high = length if length == 0 else self._high

    def drop_last(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        if not 0 <= count <= self.length:
            raise InputError(
                f"drop_last({count}): the cache has seen {self.length} tokens; give 0 to {self.length}"
            )
        self.truncate_to(self.length - count)

    def reorder(self, parents: Tensor) -> None:
        """Row b becomes an independent copy of row parents[b] (beam search)."""
        self._data = {name: t.index_select(0, parents.to(t.device)) for name, t in self._data.items()}

    def _index(self, start: int, stop: int) -> slice | Tensor:
        """Ring places of tokens start..stop-1 in age order: a slice when they do not wrap."""
        if stop == start:
            return slice(0, 0)
        first, last = start % self.rows, (stop - 1) % self.rows
        if first <= last:
            return slice(first, last + 1)
        device = next(iter(self._data.values())).device
        return torch.arange(start, stop, device=device) % self.rows

    def _grow(self, needed: int) -> None:
        if self.keep is not None or needed <= self.rows:
            return
        if self.fixed:
            raise InputError(
                f"the cache was made for max_length={self.rows} tokens and {needed} are needed; make a longer one"
            )
        rows = max(64, needed, 2 * self.rows)
        for name, t in self._data.items():
            larger = t.new_zeros(t.shape[0], rows, *t.shape[2:])
            larger[:, : self.length] = t[:, : self.length]
            self._data[name] = larger


class Cache:
    """The slots of one model for one batch, keyed by the name of the module that owns each.

    length: tokens seen, the absolute position of the next one. segments: document ids of the rows still
    readable, (B, rows) with the newest last, or None as long as no segments were given.
    """

    def __init__(self, slots: dict[str, Slot], batch_size: int, max_rollback: int = 0) -> None:
        self.slots = slots
        self.batch_size, self.max_rollback = batch_size, max_rollback
        self.length = 0
        self.segments: Tensor | None = None
        self._documents: Slot | None = None

    def __getitem__(self, name: str) -> Slot:
        return self.slots[name]

    def begin(
        self, count: int, segments: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Announce `count` new tokens; returns their document ids and positions, (B, count) each, or None.

        Tokens without segments continue the document of the token before them; tokens fed before the first
        segments belong to document 0. Positions count within each document unless they are given.
        """
        if segments is None and self._documents is None:
            return None, positions
        if self._documents is None:
            assert segments is not None
            self._documents = self._new_documents(segments.device)
        last = self._documents.newest() if self._documents.length else None
        if segments is None:
            assert last is not None
            segments = last["segment"].expand(-1, count)
        if positions is None:
            positions = document_positions(segments, last)
        seen = self._documents.append(segment=segments, position=positions.expand(segments.shape))
        self.segments = seen["segment"]
        return segments, positions

    def _new_documents(self, device: torch.device) -> Slot:
        keeps = [slot.keep for slot in self.slots.values()]
        keep = None if None in keeps else max([k for k in keeps if k is not None], default=0)
        row = ((), torch.int64)
        slot = Slot(
            self.batch_size,
            {"segment": row, "position": row},
            keep=None if keep is None else max(keep, 1),
            max_rollback=self.max_rollback,
            device=device,
        )
        if self.length:
            counted = torch.arange(self.length, device=device).expand(self.batch_size, -1)
            slot.append(segment=torch.zeros_like(counted), position=counted)
        return slot

    def advance(self, count: int) -> None:
        """Count tokens that a forward pass has appended."""
        self.length += count

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._all())

    def truncate_to(self, length: int) -> None:
        """Forget every token from position `length` on, in every slot or in none."""
        if not 0 <= length <= self.length:
            raise InputError(
                f"truncate_to({length}): the cache has seen {self.length} tokens; give 0 to {self.length}"
            )
        for slot in self._all():
            slot.check_rollback(length)
        for slot in self._all():
            slot.truncate_to(length)
        self.length = length

    def drop_last(self, count: int) -> None:
        """Forget the newest `count` tokens in every slot."""
        if not 0 <= count <= self.length:
            raise InputError(
                f"drop_last({count}): the cache has seen {self.length} tokens; give 0 to {self.length}"
            )
        self.truncate_to(self.length - count)

    def reorder(self, parents: Tensor) -> None:
        """Row b becomes an independent copy of row parents[b], in every slot."""
        for slot in self._all():
            slot.reorder(parents)

    def _all(self) -> list[Slot]:
        return [*self.slots.values(), *([self._documents] if self._documents else [])]


def document_positions(segments: Tensor, last: dict[str, Tensor] | None = None) -> Tensor:
    """Positions (B, T) counted within each run of equal segment ids (B, T).

    last: segment and position (B, 1) of the token before the first, whose document may go on.
    """
    index = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    if last is None:
        before, offset = segments[:, :1] - 1, torch.zeros_like(segments[:, :1])
    else:
        before, offset = last["segment"], last["position"] + 1
    begins = segments != torch.cat((before, segments[:, :-1]), 1)
    start = torch.where(begins, index, -1).cummax(1).values if segments.shape[1] else index
    return torch.where(start < 0, index + offset, index - start)


class Remembers:
    """Mixin of a module with memory over tokens. The model that owns it sets `slot_name` once."""

    slot_name: str = ""

    def new_slot(
        self,
        batch_size: int,
        max_length: int | None,
        max_rollback: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slot:
        """An empty slot for this module."""
        raise NotImplementedError


def remembering(model: nn.Module) -> Iterator[tuple[str, Remembers]]:
    """Every module of a model that keeps memory over tokens, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, Remembers):
            yield name, module


def name_slots(model: nn.Module) -> None:
    """Give every remembering module its name in the model, once, at construction."""
    for name, module in remembering(model):
        module.slot_name = name
