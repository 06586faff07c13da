"""An addition to the stream and the norm that reads it next, in one pass over memory.

    x' = x + y,   h = norm'(x')          norm' is the next sublayer's, which the connection that adds does not know

The decoder knows the order of its norms and opens `loop` around its layers. An addition inside asks for the norm that
follows its own; what it makes ahead is taken by that norm if it meets this very sum, unchanged, and else forgotten. So
nothing pends in a method: outside of a loop, in a pipeline's stage or under torch.compile both run one by one, and
under torch.inference_mode, whose tensors do not tell whether they were changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.norm import RMSNorm
from twoaxis.ops.native.few_tokens import folds
from twoaxis.ops.precision import cast

_open: ContextVar[Loop | None] = ContextVar("ahead", default=None)


class Made(NamedTuple):
    """A norm of a sum, made with it."""

    norm: RMSNorm
    total: Tensor
    version: int
    normed: Tensor


class Loop:
    """The norm that comes after each, and what is made ahead."""

    def __init__(self, norms: Sequence[RMSNorm | None]) -> None:
        self.following = {a: b for a, b in pairwise(norms) if a is not None and folds(b)}
        self.made: Made | None = None


@contextmanager
def loop(norms: Sequence[RMSNorm | None]) -> Iterator[None]:
    """Additions inside know the norm that follows; norms: of all reads in their order, None where there is none."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # whose tensors have no versions
        yield
        return
    token = _open.set(Loop(norms))
    try:
        yield
    finally:
        _open.reset(token)


def add(norm: RMSNorm, x: Tensor, y: Tensor) -> Tensor:
    """x + y in x's dtype, (..., d) each, by the connection that has read x through `norm`."""
    found = None if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() else _open.get()
    following = None if found is None else found.following.get(norm)
    if found is None or following is None:
        return x + cast(y, x.dtype)
    total, normed = following.after_adding(x, y)
    found.made = Made(following, total, total._version, normed)
    return total


def normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """norm(x), or what was made ahead of it."""
    found = None if torch.compiler.is_compiling() else _open.get()
    if found is None or (made := found.made) is None:
        result: Tensor = norm(x)
        return result
    found.made = None
    if made.norm is norm and made.total is x and made.version == x._version:
        return made.normed
    again: Tensor = norm(x)
    return again
