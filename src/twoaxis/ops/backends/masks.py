"""The additive mask of a block of queries: 0 (plus the position bias) on visible keys, HIDDEN on others."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .plan import Block, block_plan, kept_keys
from .sinks import Sinks, find_sinks

# Finite, so that a row that sees nothing (a padded query) stays finite until it is zeroed; exp() of it is 0.
HIDDEN = -1e30


@dataclass(frozen=True)
class Masks:
    """Masks of a call for all its blocks. Positions count from the first kept key, except in `sinks`."""

    plan: tuple[Block, ...]
    window: int
    offset: int  # position of the first query
    heads: int  # key heads
    group: int  # query heads per key head
    dtype: torch.dtype
    device: torch.device
    segments: Tensor | None  # (B, kept)
    sinks: Sinks | None
    inside: Tensor | None  # (b, kept): sink tokens among the kept keys
    reach: Tensor | None  # (b, Tq): each query's own window
    tables: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # by shape, if that says it all

    def distance(self, number: int) -> Tensor:
        """Query position minus key position in the span of a block, (C, S)."""
        block = self.plan[number]
        query = torch.arange(self.offset + block.start, self.offset + block.stop, device=self.device)
        return query[:, None] - torch.arange(block.first, block.last, device=self.device)

    def additive(self, number: int, batch: slice, bias: Tensor | None) -> Tensor:
        """The mask of block `number`: (C g, S) if all rows share it, else (R, C g, S) for `batch`.

        Sink columns, if there are any, come first. `bias` is the position bias (H, window).
        """
        table = None if bias is not None else self.tables.get(self._shape(number))
        return self._build(number, batch, bias) if table is None else table

    def fill_tables(self) -> None:
        """Build the masks that depend on nothing but a block's shape, once for all slabs and for backward."""
        if self.segments is None and self.sinks is None and self.reach is None:
            for number in range(len(self.plan)):
                shape = self._shape(number)
                if shape not in self.tables:
                    self.tables[shape] = self._build(number, slice(0, 1), None)

    def _shape(self, number: int) -> tuple[int, int, int]:
        block = self.plan[number]
        return block.stop - block.start, block.last - block.first, self.offset + block.start - block.first

    def _build(self, number: int, batch: slice, bias: Tensor | None) -> Tensor:
        mask = self._visible(number, batch)  # (b, C, S)
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        added = zero.where(mask, HIDDEN)[:, None, :, None, :]  # (b, 1, C, 1, S)
        if bias is not None:
            added = added + self._bias(number, bias.to(self.dtype))
        b, h, C, _, S = added.shape
        if b == 1 and h == 1:
            return added.expand(1, 1, C, self.group, S).reshape(C * self.group, S)
        rows = batch.stop - batch.start
        return added.expand(rows, self.heads, C, self.group, S).reshape(-1, C * self.group, S)

    def _visible(self, number: int, batch: slice) -> Tensor:
        block = self.plan[number]
        keys = slice(block.first, block.last)
        distance = self.distance(number)
        near = ((distance >= 0) & (distance < self.window))[None]
        if self.reach is not None:
            near = near & (distance < _rows(self.reach, batch)[:, block.start : block.stop, None])
        if self.sinks is not None and self.inside is not None:
            near = near | ((distance >= 0) & _rows(self.inside, batch)[:, None, keys])
        if self.segments is not None:
            ids = self.segments[batch]
            asking = ids[:, self.offset + block.start : self.offset + block.stop, None]  # (b, C, 1)
            near = near & (asking == ids[:, None, keys]) & (asking >= 0)
        if self.sinks is None:
            return near
        early = _rows(self.sinks.exists, batch)[:, number, None, :]
        early = early.expand(len(near), near.shape[1], -1)  # (b, C, n)
        if self.segments is not None and self.sinks.segment is not None:
            early = early & (asking == self.sinks.segment[batch, number, None, None])
        return torch.cat([early, near], dim=-1)

    def _bias(self, number: int, bias: Tensor) -> Tensor:
        """The position bias of a block, zero beyond the window and on sink columns: (1, Hkv, C, g, S)."""
        distance = self.distance(number)
        inside = (distance >= 0) & (distance < self.window)
        table = bias.unflatten(0, (self.heads, self.group))[..., distance * inside] * inside  # (Hkv, g, C, S)
        if self.sinks is not None:
            table = torch.nn.functional.pad(table, (self.sinks.at.shape[-1], 0))
        return table.transpose(1, 2)[None]


def make_masks(
    q: Tensor,
    k: Tensor,
    window: int | None,
    dtype: torch.dtype,
    segments: Tensor | None,
    sink_tokens: int,
    reach: Tensor | None = None,
) -> Masks:
    """The masks of `local_attention(q, k, ...)`, and with them its plan."""
    (_, H, Tq, _), (_, Hkv, Tk, _) = q.shape, k.shape
    kept = kept_keys(Tq, Tk, window)
    dropped, plan = Tk - kept, block_plan(Tq, window, Tk)
    sinks = inside = None
    if sink_tokens and window is not None and Tq and (Tk > window or reach is not None):
        firsts = torch.tensor([dropped + block.first for block in plan], device=q.device)
        sinks = find_sinks(sink_tokens, firsts, Tk, segments)
        inside = sinks.inside[:, dropped:]
    masks = Masks(
        plan=plan,
        window=Tk if window is None else window,
        offset=kept - Tq,
        heads=Hkv,
        group=H // Hkv,
        dtype=dtype,
        device=q.device,
        segments=None if segments is None else segments[:, dropped:],
        sinks=sinks,
        inside=inside,
        reach=None if reach is None else reach.expand(1 if reach.ndim == 1 else q.shape[0], Tq),
    )
    masks.fill_tables()
    return masks


def _rows(x: Tensor, batch: slice) -> Tensor:
    return x if x.shape[0] == 1 else x[batch]
