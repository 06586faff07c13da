"""`rotate` by its kernel; kept are the angles."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import choice
from .call import address, threads

FEW = 1 << 14  # numbers up to which a call without gradients costs more than torch's operations
_FLOAT = torch.float32


class _Call(ctypes.Structure):
    """`Call` of rotate.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "T", "H", "D", "R", "threads")),
        ("at", ctypes.c_int64 * 3),
        ("per_row", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "x", "out")),
    ]


def library(x: Tensor, cos: Tensor, sin: Tensor) -> ctypes.CDLL | None:
    """The kernel for x (B, T, H, D) and angles (T, 1, R) or (B, T, 1, R) that need no gradient, or None."""
    size = x.numel()
    if x.ndim != 4 or not size or (size <= FEW and not torch.is_grad_enabled()):
        return None
    shape = (*x.shape[:2], 1, cos.shape[-1])
    fits = cos.shape in (shape, shape[1:]) and sin.shape == cos.shape and 2 * cos.shape[-1] <= x.shape[-1]
    if not fits or {cos.dtype, sin.dtype} != {_FLOAT} or cos.requires_grad or sin.requires_grad:
        return None
    return choice.kernel("rotate", (x,), (cos, sin))


def run(lib: ctypes.CDLL, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """x turned by its angles, or back by them, contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    (B, T, H, D), R = x.shape, cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    call = _Call(B=B, T=T, H=H, D=D, R=R, threads=max(1, min(threads(), B * T // 16)))
    call.at[:] = x.stride()[:3]
    call.per_row = T * R if cos.ndim == 4 else 0
    call.cos, call.sin = (address(y, _FLOAT, cos.shape) for y in (cos, sin))
    call.x, call.out = x.data_ptr(), out.data_ptr()
    lib.rotate(ctypes.byref(call), int(x.dtype == torch.bfloat16), int(back))
    return out
