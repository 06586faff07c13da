"""The rows of one module's memory over tokens.

A slot keeps the newest rows of some named tensors, (B, rows, ...), in a ring. Its `length` counts every
token it has seen and is not the number of rows it still holds. Appending returns the rows a module needs
from before together with ALL new rows, in age order, and drops old rows only afterwards.

A slot of fixed shapes (`fix`) returns the same number of rows at every step, the not yet filled ones first;
it reads and writes by a count that lives on the device, so that a compiled step is compiled once.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
        self.rows = keep + 1 + max_rollback if keep is not None else (max_length or 0)  # held at most
        self.length = 0  # tokens seen
        self.count: Tensor | None = None  # the same on the device, in a slot of fixed shapes
        self._high = 0  # largest length ever: rows older than _high - rows are overwritten
        self._data = {
            name: torch.zeros(batch_size, self.rows, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in fields.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.numel() * t.element_size() for t in self._data.values())

    def append(self, **new: Tensor) -> dict[str, Tensor]:
        """Store new rows (B, T, ...); return the kept rows before them and the new ones, oldest first.

        What is returned without gradients may be a view, good until the next append.
        """
        if self.count is not None:
            return {name: self._append_fixed(name, x, self.count) for name, x in new.items()}
        count = next(iter(new.values())).shape[1]
        self.check_room(count)
        self._grow(self.length + count)
        before = self.length if self.keep is None else min(self.length, self.keep)
        size, start = before + count, self.length - before
        place = start % max(self.rows, 1)
        seamless = place + size <= self.rows and not torch.is_grad_enabled()
        joined = {}
        for name, x in new.items():
            data = self._data[name]
            if seamless and data.dtype == x.dtype:
                joined[name] = data.narrow(1, place, size)
                joined[name].narrow(1, before, count).copy_(x)
            else:
                old = [data[:, where].to(x.dtype) for where in self._places(start, self.length)]
                joined[name] = torch.cat((*old, x), 1) if old else x
                self._store(data, x.detach())
        self._count_to(self.length + count)
        return joined

    def _store(self, data: Tensor, new: Tensor) -> None:
        """Write the newest of the new rows, as many as fit, behind those seen."""
        end = self.length + new.shape[1]
        new = new[:, max(0, new.shape[1] - self.rows) :]
        for where in self._places(end - new.shape[1], end):
            count = where.stop - where.start
            data[:, where] = new[:, :count]
            new = new[:, count:]

    def fix(self, count: Tensor) -> None:
        """Return the same number of rows from now on; `count` () is kept equal to `length` by the cache."""
        if self.keep is None and not self.fixed:
            raise InputError("a cache of fixed shapes needs max_length: full attention would grow")
        self.count = count

    def reads(self, count: int) -> int:
        """Rows from before that a slot of fixed shapes returns with `count` new ones."""
        return max(0, self.rows - count) if self.keep is None else self.keep

    def _append_fixed(self, name: str, x: Tensor, seen: Tensor) -> Tensor:
        data, count = self._data[name], x.shape[1]
        before, stored = self.reads(count), min(count, self.rows)
        old = (seen - before + torch.arange(before, device=x.device)) % self.rows
        joined = torch.cat((data.index_select(1, old).to(x.dtype), x), 1)
        place = (seen + torch.arange(count - stored, count, device=x.device)) % self.rows
        data.index_copy_(1, place, x[:, count - stored :].detach().to(data.dtype))
        return joined

    def advance(self, count: int) -> None:
        """Count `count` tokens that a slot of fixed shapes has stored."""
        if self.count is not None:
            self._count_to(self.length + count)

    def _count_to(self, length: int) -> None:
        self.length, self._high = length, max(self._high, length)

    def newest(self) -> dict[str, Tensor]:
        """The newest row of every field, (B, 1, ...)."""
        (place,) = self._places(self.length - 1, self.length)
        return {name: data[:, place] for name, data in self._data.items()}

    def entries(self) -> dict[str, Tensor]:
        """The rows held that may still be read, oldest first: (B, up to `rows`, ...)."""
        places = self._places(min(max(0, self._high - self.rows), self.length), self.length)
        return {
            name: torch.cat([data[:, place] for place in places], 1) if places else data[:, :0]
            for name, data in self._data.items()
        }

    def check_room(self, count: int) -> None:
        """Refuse `count` more tokens than the slot was made for."""
        needed = self.length + count
        if self.keep is None and self.fixed and needed > self.rows:
            raise InputError(
                f"the cache was made for max_length={self.rows} tokens and needs {needed}; make it longer"
            )

    def check_rollback(self, length: int) -> None:
        """Refuse a rollback to `length` tokens when rows it needs are gone."""
        check_count("truncate_to", length, self.length)
        oldest = 0 if self.keep is None else max(0, length - self.keep)
        if oldest < min(length, self._high - self.rows):
            raise InputError(  # room is for tokens before the furthest ever seen, not before the last kept
                f"cannot take back {self.length - length} of {self.length} tokens: row {oldest} is needed, oldest "
                f"held is {self._high - self.rows}; make the cache with max_rollback of at least "
                f"{self._high - length}"
            )

    def truncate_to(self, length: int) -> None:
        """Forget every token from position `length` on; refused when rows it needs are gone."""
        self.check_rollback(length)
        self.length = length
        self._high = length if length == 0 else self._high

    def drop_last(self, count: int) -> None:
        """Forget the newest `count` tokens."""
        check_count("drop_last", count, self.length)
        self.truncate_to(self.length - count)

    def reorder(self, parents: Tensor) -> None:
        """Row b becomes an independent copy of row parents[b] (beam search)."""
        self._data = {name: t.index_select(0, parents.to(t.device)) for name, t in self._data.items()}

    def _places(self, start: int, stop: int) -> list[slice]:
        """Ring places of tokens start..stop-1 in age order: no slice, one, or two when they wrap."""
        if stop == start:
            return []
        first, last = start % self.rows, (stop - 1) % self.rows + 1
        return [slice(first, last)] if first < last else [slice(first, self.rows), slice(0, last)]

    def _grow(self, needed: int) -> None:
        if self.keep is not None or needed <= self.rows:
            return
        rows = max(64, needed, 2 * self.rows)
        for name, t in self._data.items():
            larger = t.new_zeros(t.shape[0], rows, *t.shape[2:])
            larger[:, : self.length] = t[:, : self.length]
            self._data[name] = larger
        self.rows = rows


def check_count(what: str, count: int, seen: int) -> None:
    """Refuse a number of tokens that is not one of 0 to `seen`."""
    if type(count) is not int or not 0 <= count <= seen:
        raise InputError(
            f"{what}({count}): the cache has seen {seen} tokens; give a whole number, 0 to {seen}"
        )
