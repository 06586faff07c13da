"""The depth window as a rule at run time: how far back a block reads, by block, by call or by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.types import Context

States = tuple[Tensor, ...]  # (B, T, d) each, oldest first, the current one last
Logits = Sequence[Tensor] | None  # added to the score of each state: () or (B, T); -inf hides a state


def narrowed(states: States, block: int, ctx: Context, limit: int | None) -> tuple[States, Logits]:
    """The states that the context's rule leaves to the read before `block`, and what hides some from some tokens.

    limit: the method's own window; None has no end. A rule that gives all tokens the same number cuts the
    tuple, exactly like a window of that size. Raises InputError for a window below 1 or above the limit.
    """
    if ctx.depth_window is None:
        return states, None
    rule = ctx.depth_window
    window: Any = rule(block, positions_of(ctx, states[-1])) if callable(rule) else rule
    if not isinstance(window, Tensor):
        return states[-_checked(window, block, limit) :], None
    if window.dtype != torch.int64:
        raise InputError(f"the depth window's rule gave {window.dtype} at block {block}: allowed is int64")
    rows, length = states[-1].shape[:-1]
    if tuple(window.shape) not in ((), (length,), (rows, length)):
        shape = tuple(window.shape)
        raise InputError(
            f"the depth window's rule gave shape {shape} at block {block}: allowed is one number for each token, "
            f"({length},) or {(rows, length)}"
        )
    window = window.expand(rows, length)
    if not torch.compiler.is_compiling() and window.numel():  # reads numbers off the device
        low, high = (_checked(int(end), block, limit) for end in window.aminmax())
        states = states[-high:]
        if low == high:
            return states, None
    zero = states[-1].new_zeros(window.shape)
    ages = range(len(states) - 1, -1, -1)
    return states, [zero.masked_fill(window <= age, -torch.inf) if age else zero for age in ages]


def positions_of(ctx: Context, x: Tensor) -> Tensor:
    """The position of each token of x (B, T, d): (T,) or (B, T)."""
    if ctx.positions is not None:
        return ctx.positions
    start = 0 if ctx.cache is None else ctx.cache.length
    return torch.arange(start, start + x.shape[1], device=x.device)


def added(first: Logits, second: Logits) -> Logits:
    """Both logits together."""
    if first is None or second is None:
        return second if first is None else first
    return [a + b for a, b in zip(first, second, strict=True)]


def _checked(window: Any, block: int, limit: int | None) -> int:
    fits = type(window) is int and window >= 1 and (limit is None or window <= limit)
    if not fits:
        most = "1 or more" if limit is None else f"1 to {limit}, the states that the model keeps"
        raise InputError(f"the depth window's rule gave {window!r} at block {block}: allowed is {most}")
    return int(window)
