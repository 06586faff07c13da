"""`delta_rewrite` by its kernel: kept for backward are the inputs alone."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from ..rebuilt import Place, state_of
from .call import address, checked, threads

_FLOAT = torch.float32
CHANNELS = (1, 2, 4, 8)  # they divide a vector of any width


class _Call(ctypes.Structure):
    """`Call` of delta_rewrite.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "d", "m", "threads")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("state", "direction", "value", "gate", "out")),
        *((name, ctypes.c_void_p) for name in ("dout", "ddirection", "dvalue", "dgate")),
    ]


def covers(state: Tensor, direction: Tensor, m: int) -> bool:
    """Whether the kernel has this many channels and these dtypes: the state's holds the direction's."""
    return m in CHANNELS and torch.promote_types(state.dtype, direction.dtype) == state.dtype


def rewritten(
    library: ctypes.CDLL, eps: float, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor
) -> Tensor:
    """X', without a gradient."""
    out = torch.empty(state.shape, dtype=state.dtype)
    if out.numel():
        rewrite = _Rewrite(eps, state, direction, value, gate, out)
        checked(library.delta_rewrite_forward(ctypes.byref(rewrite.call), rewrite.half))
    return out


class NativeRewrite(torch.autograd.Function):
    """The arguments and results of `ops.delta_rewrite._Rewrite`."""

    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, place: Place | None, eps: float, *inputs: Any) -> Tensor:
        ctx.library, ctx.eps, ctx.place = library, eps, place
        ctx.save_for_backward(*(inputs if place is None else inputs[1:]))
        return rewritten(library, eps, *inputs)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        if ctx.place is not None:
            inputs = (state_of(ctx), *inputs)
        state, direction, value, gate = inputs
        dstate = torch.empty(state.shape, dtype=state.dtype)
        ddirection = torch.empty(direction.shape, dtype=state.dtype)
        dvalue, dgate = torch.zeros(value.shape), torch.zeros(gate.shape)
        if dstate.numel():
            rewrite = _Rewrite(ctx.eps, state, direction, value, gate, dstate)
            call, dout = rewrite.call, dout.contiguous()
            call.dout = address(dout, state.dtype, state.shape)
            call.ddirection = address(ddirection, state.dtype, direction.shape)
            call.dvalue, call.dgate = address(dvalue, _FLOAT, value.shape), address(dgate, _FLOAT, gate.shape)
            checked(ctx.library.delta_rewrite_backward(ctypes.byref(call), rewrite.half))
        return (
            None, None, None, dstate, ddirection.to(direction.dtype), dvalue.to(value.dtype), dgate.to(gate.dtype)
        )  # fmt: skip


class _Rewrite:
    """The inputs as a kernel takes them, and the struct that points to them; this object keeps them alive."""

    def __init__(
        self, eps: float, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, out: Tensor
    ) -> None:
        N, d, m = gate.numel(), direction.shape[-1], value.shape[-1]
        self.half = int(state.dtype == torch.bfloat16)
        self.inputs = [
            state.contiguous(), direction.to(state.dtype).contiguous(),
            value.to(_FLOAT).contiguous(), gate.to(_FLOAT).contiguous(),
        ]  # fmt: skip
        dtypes = (state.dtype, state.dtype, _FLOAT, _FLOAT)
        shapes = (state.shape, direction.shape, value.shape, gate.shape)
        self.call = _Call(N=N, d=d, m=m, threads=max(1, min(threads(), N // 16)), eps=eps)
        for name, x, dtype, shape in zip(
            ("state", "direction", "value", "gate"), self.inputs, dtypes, shapes
        ):
            setattr(self.call, name, address(x, dtype, shape))
        self.call.out = address(out, state.dtype, state.shape)
