"""RMSNorm (arXiv 1910.07467): without gain, with one, and with one after an addition.

The last two have a kernel that passes over each array once and keeps the normed rows with 1/rms of each, where torch
composes five operations and keeps the rows once more, divided by their rms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .native import rms_norm as native
from .precision import cast, compute_dtype
from .second_order import by_torch, differentiable


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in at least float32; same shape and dtype."""
    return F.rms_norm(x.to(compute_dtype(x)), x.shape[-1:], eps=eps).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6, *, dtype: torch.dtype | None = None) -> Tensor:
    """gain x / sqrt(mean(x^2) + eps) over the last dimension, computed in at least float32.

    x: (..., d), gain: (d,). The result is rounded once, to `dtype`; None is x's.
    """
    wanted = x.dtype if dtype is None else dtype
    if (lib := native.library(x, gain, wanted)) is None:
        return _plain(x, gain, eps, wanted)
    if not torch.is_grad_enabled():
        return native.forward(lib, x, gain, eps, wanted)[0]
    normed: Tensor = _Norm.apply(lib, x, gain, eps, wanted)
    return normed


def add_rms_norm(
    x: Tensor, branch: Tensor, gain: Tensor, eps: float = 1e-6, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch in x's dtype, and `rms_norm` of it: (..., d) each."""
    wanted = x.dtype if dtype is None else dtype
    if (lib := native.library(x, gain, wanted, branch)) is None:
        total = x + cast(branch, x.dtype)
        return total, _plain(total, gain, eps, wanted)
    if not torch.is_grad_enabled():
        normed, total, _ = native.forward(lib, x, gain, eps, wanted, branch)
        return total, normed
    both: tuple[Tensor, Tensor] = _AddNorm.apply(lib, x, branch, gain, eps, wanted)
    return both


def _plain(x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return cast(F.rms_norm(x, gain.shape, cast(gain, x.dtype), eps), dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Any, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        out, _, scale = native.forward(lib, x, gain, eps, dtype)
        ctx.lib, ctx.options = lib, (eps, dtype)
        ctx.save_for_backward(x, gain, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, scale = ctx.saved_tensors
        if by_torch(grad):
            inputs, needed = (x, gain), ctx.needs_input_grad[1:3]
            again = differentiable(lambda x, g: _plain(x, g, *ctx.options), inputs, (grad,), needed)
            return None, *again, None, None
        dx, dgain, _ = native.backward(ctx.lib, x, gain, scale, grad)
        return None, dx, dgain, None, None


class _AddNorm(torch.autograd.Function):
    """Keeps the sum, which the next addition keeps anyway as its norm's rows."""

    @staticmethod
    def forward(
        ctx: Any, lib: Any, x: Tensor, branch: Tensor, gain: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out, total, scale = native.forward(lib, x, gain, eps, dtype, branch)
        ctx.lib, ctx.options, ctx.branch = lib, (eps, dtype), branch.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, gain, scale)
        return total, out

    @staticmethod
    def backward(ctx: Any, of_total: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        total, gain, scale = ctx.saved_tensors
        if grad is None:  # nobody used the norm
            if of_total is None:
                return (None,) * 6
            return None, of_total, of_total.to(ctx.branch), None, None, None
        if by_torch(of_total, grad):
            normed = differentiable(
                lambda s, g: _plain(s, g, *ctx.options),
                (total, gain),
                (grad,),
                (True, ctx.needs_input_grad[3]),
            )
            dx = normed[0] if of_total is None else normed[0] + of_total  # type: ignore[operator]
            return None, dx, dx.to(ctx.branch), normed[1], None, None  # type: ignore[union-attr]
        dx, dgain, dbranch = native.backward(ctx.lib, total, gain, scale, grad, of_total, ctx.branch)
        return None, dx, dbranch, dgain, None, None
