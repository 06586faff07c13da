"""Sink tokens of the blocked window: the first n tokens of a query's segment, before its block's span."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ..window import segment_order


class Sinks(NamedTuple):
    """Per block, the n sink tokens before its span; b is 1 without segments, else B."""

    at: Tensor  # (b, blocks, n) absolute positions
    exists: Tensor  # (b, blocks, n): that position is a sink token and lies before the span
    segment: Tensor | None  # (b, blocks): the segment they belong to
    inside: Tensor  # (b, Tk): sink tokens, which stay visible inside a span too (and are counted once)

    def gather(self, x: Tensor) -> Tensor:
        """The sink rows of every block: (B, Hkv, Tk, D) -> (B, Hkv, blocks, n, D)."""
        (B, Hkv, _, D), (_, blocks, n) = x.shape, self.at.shape
        index = self.at.expand(B, blocks, n).reshape(B, 1, blocks * n, 1).expand(B, Hkv, blocks * n, D)
        return x.gather(2, index).unflatten(2, (blocks, n))


def find_sinks(n: int, firsts: Tensor, Tk: int, segments: Tensor | None) -> Sinks:
    """The sinks of blocks whose spans begin at the absolute positions `firsts` (blocks,).

    Segments must not be interleaved: then only the segment that is open where a span begins can have sink
    tokens before it.
    """
    rank = torch.arange(n, device=firsts.device)
    if segments is None:
        index = rank.clamp(max=Tk - 1).expand(len(firsts), n)[None]
        inside = (torch.arange(Tk, device=firsts.device) < n)[None]
        return Sinks(index, rank < firsts[None, :, None], None, inside)
    order, place, ranks = segment_order(segments)
    previous = _previous_token(segments)
    _refuse_interleaved(segments, ranks, previous)
    last = previous[:, firsts.clamp(max=Tk - 1)]  # (B, blocks): the last token before the span, or -1
    token = last.clamp(min=0)
    begin = (place - ranks).gather(1, token)  # where its segment begins in the order
    B, blocks = token.shape
    index = order.gather(1, (begin[..., None] + rank).clamp(max=Tk - 1).flatten(1)).view(B, blocks, n)
    segment = segments.gather(1, token)
    same = segments.gather(1, index.flatten(1)).view(B, blocks, n) == segment[..., None]
    exists = same & (index < firsts[:, None]) & (last >= 0)[..., None]
    return Sinks(index, exists, segment, (ranks < n) & (segments >= 0))


def _previous_token(segments: Tensor) -> Tensor:
    """The newest position before each one that is not padding, -1 if there is none: (B, Tk)."""
    at = torch.arange(segments.shape[1], device=segments.device)
    upto = torch.where(segments >= 0, at, -1).cummax(dim=1).values
    return torch.cat([torch.full_like(upto[:, :1], -1), upto[:, :-1]], dim=1)


def _refuse_interleaved(segments: Tensor, ranks: Tensor, previous: Tensor) -> None:
    before = segments.gather(1, previous.clamp(min=0))
    wrong = ((segments >= 0) & (ranks > 0) & (before != segments)).any()
    message = "sink_tokens with interleaved segments: give every segment one stretch of tokens per row"
    if torch.compiler.is_compiling():  # a check that is part of the graph: RuntimeError, with the same words
        torch._assert_async(~wrong, message)
    elif bool(wrong):
        raise InputError(message)
