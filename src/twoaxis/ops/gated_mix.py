"""The read of a generalised residual network: a weighted sum whose gates look at one source at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from . import choice, few_tokens, gated_sums
from .first_order import first_order
from .known_gates import known_gates
from .native import gated_mix as native
from .native.few_tokens import gated as native_step
from .precision import compute_dtype, few, full_precision


def gated_mix(
    sources: Sequence[Tensor], weights: Tensor, gate: Tensor, *, norm_eps: float | None = None
) -> tuple[Tensor, ...]:
    """O reads g_o = sum_i (b_oi + relu(<w_o, v_i>)) * v_i of the same sources (arXiv 2502.06785).

    sources: tuple of n tensors (..., d). weights: b, (O, n) or, for each feature, (O, n, d). gate: w, (O, d).
    norm_eps: None, or score rms(v_i) with this epsilon in place of v_i. Returns O tensors (..., d) in the
    sources' dtype; the sums run in at least float32 and are cast once.

    For backward it keeps the sources and nothing else of their size; in the decoder's own loop sources gather their
    gradients from reads by gates that it knows (`ops.known_gates`). The slope of relu at 0 is taken as 1, a
    subgradient: with 0 a gate that starts at w = 0 would never move.
    """
    if (equation := choice.equation("gated_mix")) is not None:
        equated: tuple[Tensor, ...] = equation(sources, weights, gate, norm_eps=norm_eps)
        return equated
    check_gated_mix(sources, weights, gate)
    if few(sources):
        found = native_step(sources, weights, gate, norm_eps)
        return few_tokens.gated_mix(sources, weights, gate, norm_eps) if found is None else found[0]
    if (known := known_gates(sources, weights, gate, norm_eps)) is not None:
        return known
    reads: tuple[Tensor, ...] = _GatedMix.apply(norm_eps, weights, gate, *sources)
    return reads


def check_gated_mix(sources: Sequence[Tensor], weights: Tensor, gate: Tensor) -> None:
    """Refuse shapes that do not fit together."""
    if isinstance(sources, Tensor) or not sources or any(x.shape != sources[0].shape for x in sources):
        raise InputError("sources: give a tuple of at least one (..., d) tensor, all of one shape")
    n, d = len(sources), sources[0].shape[-1]
    if gate.ndim != 2 or gate.shape[1] != d:
        raise InputError(f"gate {tuple(gate.shape)}: give one row per read, (O, d) with d = {d}")
    if weights.shape not in ((len(gate), n), (len(gate), n, d)):
        raise InputError(
            f"weights {tuple(weights.shape)} for {len(gate)} reads of {n} sources: give (O, n) or (O, n, d)"
        )


class _GatedMix(torch.autograd.Function):
    """Scores are computed again in backward, so that only the sources are kept."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:  # torch.compile counts parameters
        eps, weights, gate, *sources = args
        ctx.eps = eps
        ctx.save_for_backward(weights, gate, *sources)
        if (kernel := native.library("gated_mix", weights, gate, sources)) is not None:
            return native.forward(kernel, eps, weights, gate, sources)
        dtype = compute_dtype(*sources)
        with full_precision(sources[0]):
            return tuple(gated_sums.read(eps, weights.to(dtype), gate.to(dtype), sources))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, gate, *sources = ctx.saved_tensors
        if (kernel := native.library("gated_pull", weights, gate, sources)) is not None:
            needed = ctx.needs_input_grad[3:]
            return None, *native.backward(kernel, ctx.eps, weights, gate, sources, grads, needed)
        dtype = compute_dtype(*sources)
        b, w = weights.to(dtype), gate.to(dtype)
        db, dw, dx = torch.empty_like(b), torch.zeros_like(w), []
        with full_precision(sources[0]):
            for i, source in enumerate(sources):
                one, db[:, i], along = gated_sums.back(ctx.eps, b[:, i], w, source, grads)
                dx.append(one)
                dw += along
        return None, db.to(weights.dtype), dw.to(gate.dtype), *dx
