"""A slot that never forgets the first tokens of the document it is in: attention sinks.

Beside its ring it pins the newest n + max_rollback of the tokens that are among the first n of their document.
However many of the last max_rollback tokens are taken back, the n of the document that is then open are there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis.cache import document_positions
from twoaxis.errors import InputError
from twoaxis.slot import Slot


class SinkSlot(Slot):
    """A windowed `Slot` with pinned rows. sinks: the first so many tokens of each document stay readable."""

    def __init__(
        self,
        batch_size: int,
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]],
        *,
        sinks: int,
        keep: int,
        max_rollback: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        number = ((), torch.int64)
        fields = {**fields, "segment": number, "rank": number}  # rank: place within the document
        super().__init__(batch_size, fields, keep=keep, max_rollback=max_rollback, device=device)
        self.sinks, self.max_rollback, self._packed = sinks, max_rollback, False
        self._pinned = {  # in order of age; "rank" holds each row's number in the sequence here, -1 if empty
            name: torch.zeros(batch_size, sinks + max_rollback, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in fields.items()
        }
        self._pinned["rank"].fill_(-1)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return super().nbytes + sum(t.numel() * t.element_size() for t in self._pinned.values())

    def append(self, **new: Any) -> dict[str, Tensor]:
        """Store new rows; return the pinned rows, the kept ones and the new ones, oldest first.

        new: the fields, and `segment` (B, T), the documents of the tokens, or None. Returned with them is
        "segment", -1 for pinned rows that are empty or still among the kept ones.
        """
        first = next(x for x in new.values() if x is not None)
        given, seen = new.pop("segment"), self.length if self.count is None else self.count
        if self.count is None:  # a compiled step would be compiled anew where this changes
            self._packed = self._packed or given is not None
        segment = first.new_zeros(first.shape[:2], dtype=torch.int64) if given is None else given
        rank = document_positions(segment, self._last(seen))
        rows = super().append(**new, segment=segment, rank=rank)
        kept = rows["segment"].shape[1] - first.shape[1]
        early = (self._pinned["rank"] >= 0) & (self._pinned["rank"] < seen - kept)
        joined = {
            name: torch.cat((self._pinned[name].to(x.dtype), x), 1) for name, x in rows.items() if name in new
        }
        pinned = torch.where(early, self._pinned["segment"], -1)
        joined["segment"] = torch.cat((pinned, self._filled(rows["segment"], seen - kept)), 1)
        number = torch.arange(segment.shape[1], device=segment.device) + seen
        self._pin({**new, "segment": segment}, torch.where((rank < self.sinks) & (segment >= 0), number, -1))
        return joined

    def _last(self, seen: int | Tensor) -> dict[str, Tensor] | None:
        """Document and rank of the token before the new ones."""
        if isinstance(seen, int):
            last = self.newest() if seen else None
            return None if last is None else {"segment": last["segment"], "position": last["rank"]}
        place = ((seen - 1) % self.rows).reshape(1)
        segment, rank = (self._data[name].index_select(1, place) for name in ("segment", "rank"))
        return {"segment": torch.where(seen > 0, segment, -2), "position": rank}  # -2: no token, no document

    def _filled(self, segment: Tensor, oldest: int | Tensor) -> Tensor:
        """The documents of the ring's rows; at fixed shapes some come before the first token and are padding."""
        if isinstance(oldest, int):
            return segment
        number = torch.arange(segment.shape[1], device=segment.device) + oldest
        return torch.where(number >= 0, segment, -1)

    def _pin(self, new: dict[str, Tensor], number: Tensor) -> None:
        """Keep the newest of the pinned and the new sink tokens; `number` (B, T) is -1 for other tokens."""
        at = torch.cat((self._pinned["rank"], number), 1)
        newest = at.topk(self._pinned["rank"].shape[1], 1).indices.flip(1)
        self._pinned["rank"].copy_(at.gather(1, newest))
        for name, x in new.items():
            old = self._pinned[name]
            both = torch.cat((old, x.detach().to(old.dtype)), 1)
            index = newest.reshape(*newest.shape, *[1] * (x.ndim - 2)).expand(*newest.shape, *x.shape[2:])
            old.copy_(both.gather(1, index))

    def check_rollback(self, length: int) -> None:
        """Refuse a rollback to `length` tokens when rows it needs are gone."""
        super().check_rollback(length)
        back, places = self._high - length, self._pinned["rank"].shape[1]
        packed = self._packed or self.count is not None  # steps of fixed shapes always have documents
        if length and packed and back > self.max_rollback and self._high > places:
            raise InputError(
                f"cannot take back to token {length}, {back} before the last: sink tokens of earlier "
                f"documents are kept for {self.max_rollback}; make the cache with max_rollback of at least {back}"
            )

    def truncate_to(self, length: int) -> None:
        """Forget every token from position `length` on; refused when rows it needs are gone."""
        super().truncate_to(length)
        at = self._pinned["rank"]
        self._pinned["rank"] = torch.where(at < length, at, -1)
        self._packed = self._packed and length > 0

    def reorder(self, parents: Tensor) -> None:
        """Row b becomes an independent copy of row parents[b] (beam search)."""
        super().reorder(parents)
        self._pinned = {name: t.index_select(0, parents.to(t.device)) for name, t in self._pinned.items()}
