"""The language model's loss of logits: cross-entropy in nats, summed over the tokens that have a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .native import token_loss as native
from .second_order import by_torch, differentiable


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """sum_i log sum_v e^(z_iv) - z_i,t(i) over targets that are not -100, (), in at least float32.

    logits: (..., V), targets: (...) int64. The kernel keeps the logits and two numbers of each token, where torch keeps
    log-probabilities in float32.
    """
    if logits.numel() == 0:
        return logits.sum(dtype=torch.promote_types(logits.dtype, torch.float32))
    flat, wanted = logits.flatten(0, -2), targets.flatten()
    if (lib := native.library(flat, wanted)) is None:
        return _plain(flat, wanted)
    if not torch.is_grad_enabled():
        return native.forward(lib, flat, wanted)[0].sum()
    summed: Tensor = _TokenLoss.apply(lib, flat, wanted)
    return summed


def _plain(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=-100, reduction="sum")


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Any, logits: Tensor, targets: Tensor) -> Tensor:
        loss, scale = native.forward(lib, logits, targets)
        ctx.lib = lib
        ctx.save_for_backward(logits, targets, scale)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, scale = ctx.saved_tensors
        if by_torch(grad):
            again = differentiable(lambda z: _plain(z, targets), (logits,), (grad,), (True,))
            return None, *again, None
        return None, native.backward(ctx.lib, logits, targets, scale, grad), None
