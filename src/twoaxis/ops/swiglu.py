"""The gated activation silu(gate) * up (arXiv 2002.05202) of the one product that makes both.

Kept for backward is that product alone, which the linear map before it does not keep: the activation is made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from .native import swiglu as native
from .second_order import by_torch, differentiable


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, (..., h), of x (..., 2 h) with the gate's numbers first. Raises InputError for an odd width."""
    if not x.ndim or x.shape[-1] % 2:
        raise InputError(f"x {tuple(x.shape)}: give (..., 2 h), gate and up side by side")
    if (lib := native.library(x)) is None:
        return _plain(x)
    if not torch.is_grad_enabled():
        return native.forward(lib, x)
    activated: Tensor = _SwiGLU.apply(lib, x)
    return activated


def _plain(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Any, x: Tensor) -> Tensor:
        ctx.lib = lib
        ctx.save_for_backward(x)
        return native.forward(lib, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if by_torch(grad):
            return None, *differentiable(_plain, (x,), (grad,), (True,))
        return None, native.backward(ctx.lib, x, grad)
