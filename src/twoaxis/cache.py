"""Memory over tokens for decoding: one slot per module that needs one, all with the same five verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.errors import InputError
from twoaxis.slot import Slot, check_count

__all__ = ["Cache", "Remembers", "Slot", "document_positions", "name_slots", "remembering"]


class Cache:
    """The slots of one model for one batch, keyed by the name of the module that owns each.

    length: tokens seen, the absolute position of the next one. segments: document ids of the rows still
    readable, (B, rows) with the newest last, or None as long as no segments were given.
    fixed_shapes: every step of one size works on tensors of the same shapes, for compiled decoding.
    """

    def __init__(
        self,
        slots: dict[str, Slot],
        batch_size: int,
        max_rollback: int = 0,
        *,
        fixed_shapes: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.slots = slots
        self.batch_size, self.max_rollback = batch_size, max_rollback
        self.length = 0
        self.segments: Tensor | None = None
        self._documents: Slot | None = None
        self._count: Tensor | None = None
        self._shared: dict[Any, Any] = {}
        self._made: dict[Any, Any] = {}
        if fixed_shapes:
            self._count = torch.zeros((), dtype=torch.int64, device=device)
            for slot in slots.values():
                slot.fix(self._count)

    @property
    def fixed_shapes(self) -> bool:
        """Whether every step of one size works on tensors of the same shapes."""
        return self._count is not None

    def __getitem__(self, name: str) -> Slot:
        if name not in self.slots:
            raise InputError(f"this cache holds nothing of {name}: it was made by another model")
        return self.slots[name]

    def begin(
        self, count: int, segments: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Announce `count` new tokens; returns their document ids and positions, (B, count) each, or None.

        Tokens without segments continue the document of the token before them; tokens fed before the first
        segments belong to document 0. Positions count within each document unless they are given. Refused,
        before anything is stored, when a slot has no room or an earlier pass ended half-way.
        """
        self._shared = {}
        for slot in self._all():
            if slot.length != self.length:
                raise InputError("an earlier pass through this cache ended half-way; make a new cache")
            slot.check_room(count)
        segments, positions = self._follow(count, segments, positions)
        if self._count is None:
            return segments, positions
        return self._fixed(self._count.fill_(self.length), count, segments, positions)

    def _follow(
        self, count: int, segments: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Documents and positions of the next tokens, after those seen."""
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

    def _fixed(
        self, seen: Tensor, count: int, segments: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same at fixed shapes: rows that are not filled yet are padding, everything is a tensor."""
        width = count + max((slot.reads(count) for slot in self.slots.values()), default=0)
        age = torch.arange(width - 1, -1, -1, device=seen.device)  # of each row, 0 is the newest token
        if segments is None:
            row = torch.where(age < self.length + count, 0, -1)
            self.segments = row.expand(self.batch_size, -1).contiguous()
            segments = self.segments[:, width - count :]
        else:
            assert self.segments is not None
            self.segments = F.pad(self.segments[:, -width:], (width - self.segments.shape[1], 0), value=-1)
        if positions is None:
            positions = torch.arange(self.length, self.length + count, device=seen.device)
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

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that all blocks of one pass share, such as angles: made for the first that asks."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def made_of(self, weights: tuple[Tensor, ...], make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of parameters, once for all passes, and again when one of them has changed."""
        at = tuple(w.data_ptr() for w in weights)
        versions = [0 if w.is_inference() else w._version for w in weights]
        made: Tensor
        if at in self._made and self._made[at][0] == versions:
            made = self._made[at][1]
        else:
            made = make()
            self._made[at] = (
                versions,
                made,
                weights,
            )  # kept, so that nothing else comes to lie at their addresses
        return made

    def advance(self, count: int) -> None:
        """Count tokens that a forward pass has appended."""
        self.length += count
        for slot in self.slots.values():
            slot.advance(count)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._all())

    def truncate_to(self, length: int) -> None:
        """Forget every token from position `length` on, in every slot or in none."""
        check_count("truncate_to", length, self.length)
        for slot in self._all():
            slot.check_rollback(length)
        for slot in self._all():
            slot.truncate_to(length)
        self.length = length
        if length == 0:  # the next tokens may come with documents or without
            self._documents = self.segments = None

    def drop_last(self, count: int) -> None:
        """Forget the newest `count` tokens in every slot."""
        check_count("drop_last", count, self.length)
        self.truncate_to(self.length - count)

    def reorder(self, parents: Tensor) -> None:
        """Row b becomes an independent copy of row parents[b], in every slot; parents (B',) set the batch."""
        if not isinstance(parents, Tensor):
            raise InputError(f"parents {parents!r}: give a tensor with one row number for each new row")
        if parents.ndim != 1 or parents.is_floating_point() or parents.dtype == torch.bool:
            raise InputError(
                f"parents {parents.dtype} {tuple(parents.shape)}: give one row number for each new row"
            )
        if len(parents) and not 0 <= int(parents.min()) <= int(parents.max()) < self.batch_size:
            raise InputError(f"parents {parents.tolist()}: the cache has rows 0 to {self.batch_size - 1}")
        self.batch_size = len(parents)
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
    """Mixin of a module with memory over tokens. The model that owns it sets `slot_name` once.

    remembers: False in a module that was built without what it would keep.
    """

    slot_name: str = ""
    remembers: bool = True

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
        if isinstance(module, Remembers) and module.remembers:
            yield name, module


def name_slots(model: nn.Module) -> None:
    """Give every remembering module its name in the model, once, at construction."""
    for name, module in remembering(model):
        module.slot_name = name
