"""Prompt-lookup decoding: draft what followed the same words before, verify all of it in one pass.

The draft is what followed the latest earlier place of the newest n-gram in the row (prompt lookup decoding,
A. Saxena 2023); the greedy tokens of one pass over the draft are kept as far as they agree with it (the
verification of speculative decoding, arXiv 2211.17192, at temperature 0), and the cache takes the rest back.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST = 3  # n-grams of 3 tokens are looked up first, then of 2, then of 1


def draft(row: Tensor, count: int) -> Tensor:
    """Up to `count` tokens that followed the latest earlier place of the newest n-gram of row (T,)."""
    for n in range(min(LONGEST, len(row) - 1), 0, -1):
        places = (row[:-1].unfold(0, n, 1) == row[-n:]).all(1).nonzero()
        if len(places):
            start = int(places[-1]) + n
            return row[start : start + count]
    return row[:0]


def drafts(rows: Tensor, count: int) -> Tensor:
    """A draft for each row (B, T), all of one length (B, up to count); a shorter one repeats its last."""
    found = [draft(row, count) if count else row[:0] for row in rows]
    width = max((len(d) for d in found), default=0)
    if width == 0:
        return rows[:, :0]
    ends = [d[-1:] if len(d) else row[-1:] for d, row in zip(found, rows)]
    return torch.stack([torch.cat((d, end.expand(width - len(d)))) for d, end in zip(found, ends)])


def accepted(draft: Tensor, chosen: Tensor, ended: Tensor) -> int:
    """How many drafted tokens (B, n) were chosen too (B, n + 1), in all rows that have not ended (B, 1)."""
    agrees = (draft == chosen[:, : draft.shape[1]]) | ended
    return int(agrees.all(0).cumprod(0).sum())
