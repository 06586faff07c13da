"""A weighted sum of states, with weights that are given rather than read off the states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import choice, few_tokens
from .checks import Weights, check_mix
from .first_order import first_order
from .known_mix import known_mix
from .mix_sums import chunks, flat, mixed, rows
from .native import mix as native
from .precision import compute_dtype, few, full_precision


def mix(sources: Sequence[Tensor], weights: Weights) -> Tensor:
    """sum_j w_j x_j (DenseFormer 2402.02622, ELC-BERT 2311.02265, DeepCrossAttention 2502.06785).

    Sums run in at least float32 and are cast once to the sources' dtype. Backward keeps sources and weights. In
    the decoder's own loop sources gather their gradients from mixes by weights that it knows (`ops.known_mix`).

    Args:
        sources: tuple of n tensors (..., d) of one shape.
        weights: (n,), or (n, d) by feature, or one tensor per source: a scalar, (...) or (..., 1).

    Raises:
        InputError: for shapes that do not fit.
    """
    if (equation := choice.equation("mix")) is not None:
        equated: Tensor = equation(sources, weights)
        return equated
    if isinstance(weights, Tensor) and (found := known_mix(sources, weights)) is not None:
        return found
    every = check_mix(sources, weights)
    if isinstance(weights, Tensor) and few(sources):
        return few_tokens.mix(sources, weights)
    out: Tensor = _Mix.apply(len(every), *every, *sources)
    return out


class _Mix(torch.autograd.Function):
    """Weights are (), (d,) or (..., 1); sources (..., d)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:  # torch.compile counts parameters
        n, *tensors = args
        ctx.save_for_backward(*tensors)
        if (kernel := native.library(tensors[:n], tensors[n:])) is not None:
            return native.forward(kernel, tensors[:n], tensors[n:])
        return mixed(tensors[:n], tensors[n:])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: a checkpoint unpacks it once
        n = len(tensors) // 2
        if (kernel := native.library(tensors[:n], tensors[n:])) is not None:
            return None, *native.backward(kernel, tensors[:n], tensors[n:], grad, ctx.needs_input_grad[1:])
        dtype, d = compute_dtype(*tensors[n:]), tensors[n].shape[-1]
        weights, sources = flat(tensors[:n], dtype), [x.reshape(-1, d) for x in tensors[n:]]
        dweights = [torch.zeros_like(w) for w in weights]
        dsources = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in sources]
        with full_precision(grad):
            for t in chunks(sources, dtype):
                g = grad.reshape(-1, d)[t].to(dtype)
                for j, (x, w) in enumerate(zip(sources, weights)):
                    if ctx.needs_input_grad[1 + j]:
                        _add_weight_gradient(dweights[j], g, x[t].to(dtype), t)
                    if ctx.needs_input_grad[1 + n + j]:
                        torch.mul(g, rows(w, t), out=dsources[j][t])
        shaped = (dx.view(x.shape).to(x.dtype) for dx, x in zip(dweights + dsources, tensors))
        return None, *shaped


def _add_weight_gradient(dw: Tensor, g: Tensor, x: Tensor, t: slice) -> None:
    if dw.ndim == 0:
        dw += torch.dot(g.flatten(), x.flatten())
    elif dw.ndim == 1:
        dw += (g * x).sum(0)
    else:
        dw[t] = (g * x).sum(-1, keepdim=True)
