"""`depthwise_causal_conv` by its kernel, without documents: kept are x, history and weight, and no padded copy."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..first_order import first_order
from .call import address, checked, threads

_FLOAT = torch.float32


class _Call(ctypes.Structure):
    """`Call` of causal_conv.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "T", "C", "k", "R", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "history", "weight", "out")),
        *((name, ctypes.c_void_p) for name in ("dout", "dx", "dhistory", "dweight")),
    ]


def library(x: Tensor, weight: Tensor, history: Tensor | None, segments: Tensor | None) -> ctypes.CDLL | None:
    """The kernel for x (B, T, C) and weight (C, k) of all channels, or None."""
    if segments is not None or weight.ndim != 2 or x.shape[2:] != weight.shape[:1] or not x.numel():
        return None
    return choice.kernel("causal_conv", (x,) if history is None else (x, history), (weight,))


class NativeConv(torch.autograd.Function):
    """y, from x, weight and history."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor, weight: Tensor, history: Tensor | None) -> Tensor:
        ctx.library = library
        ctx.save_for_backward(x, weight, history)
        run = _Run(x, weight, history)
        out = torch.empty(x.shape, dtype=x.dtype)
        run.call.out = address(out, x.dtype, x.shape)
        checked(library.conv_forward(ctypes.byref(run.call), run.half))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, history = ctx.saved_tensors
        run, dout = _Run(x, weight, history), dout.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype)
        dhistory = torch.empty_like(run.history) if ctx.needs_input_grad[3] else None
        dweight = torch.zeros(run.call.threads, *run.weight.shape)
        run.call.dout, run.call.dx = (address(d, x.dtype, x.shape) for d in (dout, dx))
        if dhistory is not None:
            run.call.dhistory = address(dhistory, x.dtype, dhistory.shape)
        run.call.dweight = address(dweight, _FLOAT, dweight.shape)
        checked(ctx.library.conv_backward(ctypes.byref(run.call), run.half))
        return None, dx, dweight.sum(0).T.to(weight.dtype), dhistory


class _Run:
    """The inputs as the kernel takes them, and the struct that points to them; this object keeps them alive."""

    def __init__(self, x: Tensor, weight: Tensor, history: Tensor | None) -> None:
        (B, T, C), k = x.shape, weight.shape[1]
        self.half = int(x.dtype == torch.bfloat16)
        self.x, self.weight = x.contiguous(), weight.T.to(_FLOAT).contiguous()
        self.history = (x[:, :0] if history is None else history).contiguous()
        R = self.history.shape[1]
        self.call = _Call(B=B, T=T, C=C, k=k, R=R, threads=max(1, min(threads(), B * T // 16)))
        self.call.x = address(self.x, x.dtype, (B, T, C))
        self.call.history = address(self.history, x.dtype, (B, R, C)) if R else None
        self.call.weight = address(self.weight, _FLOAT, (k, C))
