"""The language model's loss of what the head reads, chunk by chunk; of logits it is `ops.token_loss`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.ops.choice import transformed
from twoaxis.ops.precision import full_precision


def chunked_token_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`token_loss` of the logits W x, which never exist whole: x (B, T, d), weight (V, d), targets (B, T).

    Torch's `linear_cross_entropy` makes logits and their gradient for some tokens at a time in the forward pass and
    keeps the gradients of x and W, (B T + V) d numbers in place of several times B T V; on a CPU the loss takes 1.2 to
    1.7 times as long (torch 2.13, V of 8k to 32k). Under autocast the numbers
    are rounded as for its product, the sums run in float32. A second derivative, and a second backward
    pass over the same graph, are refused. Raises InputError where torch is older than 2.13, under `torch.func`'s
    transforms and in forward mode.
    """
    if transformed():
        raise InputError(
            "chunked loss under torch.func's transforms or in forward mode: take the loss of whole logits"
        )
    if not hasattr(F, "linear_cross_entropy"):
        raise InputError(
            f"chunked loss: needs torch 2.13 or newer, this is {torch.__version__}; leave it out"
        )
    kind, dtype = (
        x.device.type,
        torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32),
    )
    if torch.is_autocast_enabled(kind) and dtype == torch.float32:
        x, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (x, weight))
    with full_precision(x):
        summed: Tensor = F.linear_cross_entropy(
            x.flatten(0, 1).to(dtype),
            weight.to(dtype),
            targets.flatten(),
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(),
        )
    once: Tensor = _Once.apply(summed)
    return once


class _Once(torch.autograd.Function):
    """The number itself; torch drops the loss's second derivatives without a word if other terms have some."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True through the chunked loss, which has first-order gradients only: "
                "take the loss of whole logits"
            )
        return grad
