"""A state with value channels read as one vector: a weighted sum over its channels (arXiv 2601.00417)."""

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from . import choice, rebuilt
from .checks import check_floating
from .first_order import first_order
from .precision import compute_dtype, full_precision


def channel_read(state: Tensor, weights: Tensor) -> Tensor:
    """u_i = sum_v W[i, v] X[.., i, v]: (..., d, m) -> (..., d), in the state's dtype, the sum in at least float32.

    Keeps its inputs for backward, and inside the decoder's own loop (`ops.rebuilt`) not the state.

    Raises:
        InputError: for weights that are not (d, m).
    """
    check_channel_read(state, weights)
    if (equation := choice.compiled("channel_read", state, weights)) is not None:
        equated: Tensor = equation(state, weights)
        return equated
    loop = rebuilt.current()
    if not torch.is_grad_enabled():
        return _read(state, weights)
    out: Tensor = _ChannelRead.apply(None if loop is None else loop.place_of(state), state, weights)
    return out


def check_channel_read(state: Tensor, weights: Tensor) -> None:
    """Refuse what does not fit."""
    check_floating("state", state)
    if state.ndim < 2 or weights.shape != state.shape[-2:]:
        raise InputError(
            f"state {tuple(state.shape)}, weights {tuple(weights.shape)}: give (..., d, m) and (d, m)"
        )


def _read(state: Tensor, weights: Tensor) -> Tensor:
    dtype = compute_dtype(state)
    with full_precision(state):
        return (state.to(dtype) * weights.to(dtype)).sum(-1).to(state.dtype)


class _ChannelRead(torch.autograd.Function):
    """dX = du W, dW = sum over tokens of du X."""

    @staticmethod
    def forward(ctx: Any, place: rebuilt.Place | None, state: Tensor, weights: Tensor) -> Tensor:
        ctx.place = place
        ctx.save_for_backward(weights, *((state,) if place is None else ()))
        return _read(state, weights)

    @staticmethod
    @first_order
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        weights, *kept = ctx.saved_tensors
        X = kept[0] if ctx.place is None else rebuilt.state_of(ctx)
        dtype, (d, m) = compute_dtype(X), weights.shape
        with full_precision(du):
            g = du.to(dtype).unsqueeze(-1)
            dX = (g * weights.to(dtype)).to(X.dtype) if ctx.needs_input_grad[1] else None
            dW = (g * X.to(dtype)).reshape(-1, d, m).sum(0).to(weights.dtype)
        return None, dX, dW
