"""`swiglu` by its kernel; kept is what it was given."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import choice
from .call import address, threads

FEW = 1 << 14  # numbers up to which a call without gradients costs more than torch's operations


class _Call(ctypes.Structure):
    """`Call` of swiglu.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "h", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "dout", "out")),
    ]


def library(x: Tensor) -> ctypes.CDLL | None:
    """The kernel for x (..., 2 h), or None."""
    size = x.numel()
    if not size or (size <= FEW and not torch.is_grad_enabled()):
        return None
    return choice.kernel("swiglu", (x,))


def forward(lib: ctypes.CDLL, x: Tensor) -> Tensor:
    """silu(gate) * up, (..., h)."""
    h, x = x.shape[-1] // 2, x.contiguous()
    out = torch.empty(*x.shape[:-1], h, dtype=x.dtype)
    _run(lib, x, None, out)
    return out


def backward(lib: ctypes.CDLL, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x."""
    x, grad = x.contiguous(), grad.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype)
    _run(lib, x, grad, dx)
    return dx


def _run(lib: ctypes.CDLL, x: Tensor, grad: Tensor | None, out: Tensor) -> None:
    h = x.shape[-1] // 2
    N = x.numel() // (2 * h)
    call = _Call(N=N, h=h, threads=max(1, min(threads(), N // 16)))
    call.x, call.out = address(x, x.dtype, x.shape), out.data_ptr()
    call.dout = address(grad, x.dtype, (*x.shape[:-1], h))
    lib.swiglu(ctypes.byref(call), int(x.dtype == torch.bfloat16), int(grad is not None))
