"""Several weighted sums of the same states, by weights of each token's own.

    h_o = sum_j w_oj x_j;    dw_oj = <g_o, x_j>,    dx_j = sum_o w_oj g_o,    g_o = dL/dh_o

The weights' gradients are needed at once, since weights are made from one of the states; those of the states are not.
So in the decoder's own loop (`pulled`) backward reads the n states once, for all O sums, and leaves g_o to them: each
sums up its gradient in one pass over the O S gradients of the S mixes that saw it, where mixes that are differentiated
by themselves write n gradients each, which autograd then adds to one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import choice, few_tokens, mix_sums
from .checks import check_token_mix
from .first_order import first_order
from .native import token_mix as native
from .precision import compute_dtype, few, full_precision
from .pulled import mixed_ones
from .token_pull import TokenMixed


def token_mix(sources: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    """O sums sum_j w_oj x_j of the same sources, by weights of each token's own (MUDDFormer 2502.12170).

    Sums run in at least float32 and are cast once to the sources' dtype. Backward keeps sources and weights; in the
    decoder's own loop a source gathers its gradient once, from all mixes.

    Args:
        sources: tuple of n tensors (..., d) of one shape.
        weights: (..., O, n).

    Returns:
        O tensors (..., d).

    Raises:
        InputError: for shapes that do not fit.
    """
    if (equation := choice.equation("token_mix")) is not None:
        equated: tuple[Tensor, ...] = equation(sources, weights)
        return equated
    check_token_mix(sources, weights)
    if few(sources):
        return few_tokens.token_mix(sources, weights)
    found = mixed_ones(sources) if all(x.is_contiguous() for x in sources) else None  # copies would be kept
    pull, rows, given = (None, None, tuple(sources)) if found is None else (found[0], found[1], (found[2],))
    library = choice.kernel("token_mix", given, (weights,)) if given[0].numel() else None
    out: tuple[Tensor, ...] = _TokenMix.apply(library, pull, rows, weights, *given)
    return out


class _TokenMix(torch.autograd.Function):
    """Kept are weights and sources. rows: those of the loop, (N, d), and then only the newest one's handle is given."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:  # torch.compile counts parameters
        library, pull, rows, weights, *sources = args
        ctx.library, ctx.pull = library, pull
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, *(sources if rows is None else rows))
        xs = _rows(sources) if rows is None else rows
        flat = _flat(weights, xs)
        made = sums(flat, xs) if library is None else native.sums(library, flat.contiguous(), xs)
        return tuple(h.view(sources[0].shape) for h in made)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weights, *sources = ctx.saved_tensors  # once: a checkpoint unpacks it once
        alone, xs = ctx.pull is None, _rows(sources)
        w, needed = _flat(weights, xs).contiguous(), [alone and want for want in ctx.needs_input_grad[4:]]
        dtype = mix_sums.source_dtype(xs)
        gs = [None if g is None else g.reshape(xs[0].shape).to(dtype).contiguous() for g in grads]
        if all(g is None for g in gs):
            return (None,) * len(ctx.needs_input_grad)
        every = [xs[0].new_zeros(xs[0].shape, dtype=dtype) if g is None else g for g in gs]
        run = back if ctx.library is None else partial(native.back, ctx.library)
        dw, dxs = run(w, xs, every, needed if alone else [False] * len(xs))
        if not alone:
            ctx.pull.leave(TokenMixed(w, {o: g for o, g in enumerate(gs) if g is not None}, ctx.pull.sources))
        shaped = (None if dx is None else dx.view(x.shape) for dx, x in zip(dxs, sources))
        dw = dw.view(weights.shape).to(weights.dtype)
        return None, None, None, dw, *(shaped if alone else [None])


def sums(weights: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """O sums (N, d) of sources (N, d) by weights (N, O, n)."""
    return [mix_sums.mixed([w.unsqueeze(-1) for w in own.unbind(-1)], rows) for own in weights.unbind(1)]


def back(
    weights: Tensor, rows: Sequence[Tensor], grads: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the weights, and of the sources that need one, from those of the O sums."""
    dweights = torch.empty_like(weights)
    drows = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if n else None
        for x, n in zip(rows, needed)
    ]
    with full_precision(weights):
        for t in mix_sums.chunks(rows, weights.dtype):
            gs = [g[t].to(weights.dtype) for g in grads]
            for i, (row, into) in enumerate(zip(rows, drows)):
                x = row[t].to(weights.dtype)
                dweights[t, :, i] = torch.stack([(g * x).sum(-1) for g in gs], -1)
                if into is not None:
                    w = weights[t, :, i].unsqueeze(-1)
                    total = gs[0] * w[:, 0]
                    for o in range(1, len(gs)):
                        total.addcmul_(gs[o], w[:, o])
                    into[t] = total
    return dweights, drows


def _rows(sources: Sequence[Tensor]) -> list[Tensor]:
    return [x.reshape(-1, x.shape[-1]) for x in sources]


def _flat(weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """(N, O, n) in the dtype of sums."""
    return weights.reshape(-1, *weights.shape[-2:]).to(compute_dtype(*rows))
