"""Feed a core in pieces through a cache of its own, as recorded decoding runs did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twoaxis.cache import Cache, name_slots, remembering
from twoaxis.sequence import Mixer
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import NotRun


def cache_of(core: Mixer, x: Tensor, max_rollback: int = 0) -> Cache:
    """An empty cache for a core and rows like x (B, T, d)."""
    name_slots(core)
    slots = {
        name: part.new_slot(x.shape[0], None, max_rollback, x.dtype, x.device)
        for name, part in remembering(core)
    }
    return Cache(slots, x.shape[0], max_rollback)


def feed(core: Mixer, x: Tensor, lengths: Sequence[int], cache: Cache | None = None) -> Tensor:
    """The core's outputs (B, T, d) for x fed in pieces of these lengths, which must add up to T."""
    if any(n < 0 for n in lengths) or sum(lengths) != x.shape[1]:
        raise NotRun(f"feeds {list(lengths)} are not {x.shape[1]} tokens")
    cache = cache_of(core, x) if cache is None else cache
    pieces = []
    for piece in x.split(list(lengths), dim=1) if lengths else ():
        documents, positions = cache.begin(piece.shape[1], None, None)
        pieces.append(core(Reads(piece), Context(documents, positions, cache)))
        cache.advance(piece.shape[1])
    return torch.cat([x[:, :0], *pieces], dim=1)


def documents(starts: Tensor) -> Tensor:
    """The document (T,) of each token, from the borders cu_seqlens (n + 1,)."""
    return torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())


def newest(rows: Tensor, count: int) -> Tensor:
    """The last `count` of rows (B, R, c) as (B, c, count), zeros in front where there are fewer."""
    kept = rows[:, max(0, rows.shape[1] - count) :]
    return torch.nn.functional.pad(kept.mT, (count - kept.shape[1], 0))
