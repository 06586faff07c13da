"""AdamW (arXiv 1711.05101) of all parameters in one pass over memory, and the squares of their gradients before it.

Weights and moments are float32, a gradient is float32 or bfloat16; a copy of a weight in bfloat16 is written with it,
rounded to nearest even. What one reads is where backward and `torch.optim.AdamW` keep it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import choice
from .call import threads

_FLOAT, _HALF = torch.float32, torch.bfloat16
PIECE = 1 << 14  # as in adamw.cpp


class Part(NamedTuple):
    """One parameter of an update: its tensors, all of one shape; the number of the update, from 1; lr and decay."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rounded: Tensor | None
    step: int
    lr: float
    decay: float


class _Part(ctypes.Structure):
    """`Part` of adamw.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("size", "half")),
        *((name, ctypes.c_void_p) for name in ("grad", "weight", "m", "v", "rounded")),
        *((name, ctypes.c_float) for name in ("shrink", "step", "root")),
    ]


class _Call(ctypes.Structure):
    """`Call` of adamw.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "pieces", "threads")),
        ("parts", ctypes.POINTER(_Part)),
        *((name, ctypes.c_float) for name in ("scale", "b2", "one_b1", "one_b2", "eps")),
        ("squares", ctypes.c_void_p),
    ]


def library(weights: Sequence[Tensor]) -> ctypes.CDLL | None:
    """The kernel that updates such weights, or None."""
    floats = bool(weights) and all(w.dtype == _FLOAT for w in weights)
    return choice.kernel("adamw", weights) if floats else None


@torch.no_grad()
def update(
    lib: ctypes.CDLL, parts: Sequence[Part], betas: tuple[float, float], eps: float, scale: float
) -> bool:
    """Update weights, moments and rounded copies in place, from gradients times `scale`.

    False, and nothing is done, if a tensor has another dtype or shape or does not lie side by side.
    """
    beta1, beta2 = betas
    table = (_Part * len(parts))()
    for one, part in zip(table, parts, strict=True):
        weight, grad, exp_avg, exp_avg_sq, rounded, step, lr, decay = part
        shape = weight.shape
        if not (_fill(one, grad, shape) and _fit((weight, exp_avg, exp_avg_sq), _FLOAT, shape)):
            return False
        if rounded is not None:
            if not _fit((rounded,), _HALF, shape):
                return False
            one.rounded = rounded.data_ptr()
        one.weight, one.m, one.v = weight.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()
        one.shrink, one.step, one.root = 1 - lr * decay, -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    call = _call(table)
    call.scale, call.b2, call.one_b1, call.one_b2, call.eps = scale, beta2, 1 - beta1, 1 - beta2, eps
    lib.adamw(ctypes.byref(call))
    written = [x for part in parts for x in (part.weight, part.exp_avg, part.exp_avg_sq, part.rounded)]
    torch.autograd.graph.increment_version([x for x in written if x is not None])
    return True


def norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, float64 (), the same for any number of threads; None: not by a kernel."""
    lib = choice.kernel("adamw", gradients[:1]) if gradients else None
    table = (_Part * len(gradients))()
    if lib is None or not all(
        _fill(one, grad, grad.shape) for one, grad in zip(table, gradients, strict=True)
    ):
        return None
    call = _call(table)
    found = torch.empty(call.pieces, dtype=torch.float64)
    call.squares = found.data_ptr()
    lib.squares(ctypes.byref(call))
    return found.sum().sqrt()


def _fill(one: _Part, grad: Tensor, shape: torch.Size) -> bool:
    """Put a gradient into a row of the table, if it is one for the kernel."""
    half = grad.dtype == _HALF
    if not _fit((grad,), _HALF if half else _FLOAT, shape):
        return False
    one.size, one.half, one.grad = shape.numel(), half, grad.data_ptr()
    return True


def _fit(given: tuple[Tensor, ...], dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether these are plain memory of exactly this dtype and shape."""
    for x in given:
        if not choice.ordinary(x) or x.dtype != dtype or x.shape != shape or not x.is_contiguous():
            return False
        if x.data_ptr() % dtype.itemsize or (shape.numel() and not x.data_ptr()):  # released
            return False
    return True


def _call(table: ctypes.Array[_Part]) -> _Call:
    pieces = sum(-(-one.size // PIECE) for one in table)
    return _Call(count=len(table), pieces=pieces, threads=max(1, min(threads(), pieces)), parts=table)
