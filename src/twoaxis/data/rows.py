"""Rows of tokens with their targets, cut from a token file; and the rows that score it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twoaxis.data.checks import choice, whole
from twoaxis.data.tokens import TokenFile
from twoaxis.errors import InputError

PACKINGS = ("stream", "documents")
IGNORE = -100


class Batch(NamedTuple):
    """Rows for a model: targets are the next tokens, -100 where there is nothing to predict."""

    tokens: Tensor  # (B, T) int64; 0 at padding
    targets: Tensor  # (B, T) int64
    segments: Tensor | None  # (B, T) int64: document of each token, from 0 in each row, -1 at padding


def n_windows(n_tokens: int, block: int) -> int:
    """How many windows of `block` tokens have a target for every token: starts 0 .. n_tokens-block-1.

    `block` tokens or fewer have none, since the last token has no next one: InputError.
    """
    whole("block", block, least=1)
    if n_tokens <= block:
        raise InputError(
            f"{n_tokens} tokens cannot fill one row of {block} and its last target; "
            f"give at least {block + 1} tokens or a shorter sequence length"
        )
    return n_tokens - block


@dataclass(frozen=True)
class Layout:
    """The documents of a token file laid end to end in some order."""

    tokens: TokenFile
    ends: NDArray[Any]  # (n_documents,) where each document ends in this order
    shift: NDArray[Any]  # (n_documents,) from a position in this order to one in the file

    @classmethod
    def of(cls, tokens: TokenFile, order: NDArray[Any]) -> "Layout":
        """Lay out the documents in `order`, a permutation of their numbers."""
        ends = np.cumsum(np.diff(tokens.documents)[order])
        return cls(tokens, ends, np.asarray(tokens.documents[1:])[order] - ends)

    def rows(self, starts: NDArray[Any], seq_len: int, packing: str) -> Batch:
        """Cut rows of `seq_len` at `starts` (B,); what lies beyond the last token is padding."""
        n = self.tokens.n_tokens
        positions = starts[:, None] + np.arange(seq_len + 1)  # (B, T+1)
        inside = positions < n
        positions = np.minimum(positions, n - 1)
        document = np.searchsorted(self.ends, positions, side="right")  # (B, T+1), counted in this order
        ids = self.tokens.ids[positions + self.shift[document]].astype(np.int64)
        has_target, segments = inside[:, 1:], None
        if packing == "documents":
            has_target = has_target & (document[:, 1:] == document[:, :-1])
            segments = torch.from_numpy(np.where(inside, document - document[:, :1], -1)[:, :-1].copy())
        tokens = torch.from_numpy(np.where(inside, ids, 0)[:, :-1].copy())
        return Batch(tokens, torch.from_numpy(np.where(has_target, ids[:, 1:], IGNORE)), segments)


def eval_batches(
    tokens: TokenFile, seq_len: int, batch_size: int, max_tokens: int | None = None, packing: str = "stream"
) -> Iterator[Batch]:
    """Rows side by side that make every token after the first a target exactly once, always the same.

    Rows do not depend on `batch_size`, so neither do the summed loss and the number of targets. The last row
    is padded and the last batch may have fewer rows. `max_tokens` scores that many first targets only. With
    packing="documents" the first token of each document is no target, and rows carry segments.
    InputError for fewer than 2 tokens.
    """
    whole("seq_len", seq_len, least=1)
    whole("batch_size", batch_size, least=1)
    choice("packing", packing, PACKINGS)
    n_targets = n_windows(tokens.n_tokens, 1)
    if max_tokens is not None:
        n_targets = min(n_targets, whole("max_tokens", max_tokens, least=1))
    return _eval_batches(tokens, seq_len, batch_size, n_targets, packing)


def _eval_batches(
    tokens: TokenFile, seq_len: int, batch_size: int, n_targets: int, packing: str
) -> Iterator[Batch]:
    layout = Layout.of(tokens, np.arange(len(tokens.documents) - 1))
    starts = np.arange(0, n_targets, seq_len)
    for first in range(0, len(starts), batch_size):
        mine = starts[first : first + batch_size]
        batch = layout.rows(mine, seq_len, packing)
        unscored = torch.from_numpy(mine[:, None] + np.arange(seq_len) >= n_targets)  # (B, T)
        yield batch._replace(targets=batch.targets.masked_fill(unscored, IGNORE))
