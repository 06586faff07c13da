"""`transposed` by its kernel."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import choice
from .call import address, threads


class _Call(ctypes.Structure):
    """`Call` of transpose.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
    ]


def library(x: Tensor) -> ctypes.CDLL | None:
    """The kernel for a contiguous bfloat16 matrix that needs no gradient here, or None."""
    if x.dtype != torch.bfloat16 or not x.numel() or not x.is_contiguous() or torch.is_grad_enabled():
        return None
    return choice.kernel("transpose", (x,))


def run(lib: ctypes.CDLL, x: Tensor) -> Tensor:
    """x^T, contiguous."""
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype)
    call = _Call(rows=rows, columns=columns, threads=max(1, min(threads(), x.numel() >> 14)))
    call.x, call.out = address(x, x.dtype, x.shape), out.data_ptr()
    lib.transpose(ctypes.byref(call))
    return out
