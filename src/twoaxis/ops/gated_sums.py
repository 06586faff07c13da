"""What reads of DeepCrossAttention compute, as plain operations: see `ops.gated_mix` and `ops.known_gates`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import source_dtype


def read(eps: float | None, weights: Tensor, gate: Tensor, sources: Sequence[Tensor]) -> list[Tensor]:
    """O reads, each like a source (..., d). weights: (O, n) or (O, n, d), gate: (O, d), in the dtype of sums."""
    dtype, shape = gate.dtype, sources[0].shape
    reads = [torch.zeros(shape, dtype=dtype, device=gate.device) for _ in gate]
    for i, source in enumerate(sources):
        x = source.to(dtype)
        gates = _scores(x, gate, eps)[0].clamp_(min=0)  # (..., O)
        for o, total in enumerate(reads):
            total.addcmul_(x, weights[o, i]).addcmul_(x, gates[..., o, None])
    return [total.to(source_dtype(sources)) for total in reads]


def back(
    eps: float | None, weights: Tensor, gate: Tensor, source: Tensor, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """From S gradients of what a source (..., d) was read into: its own, those of weights (S,) or (S, d), as they were
    for this source, and of the gate (S, d)."""
    x, d = source.to(gate.dtype), source.shape[-1]
    score, r = _scores(x, gate, eps)
    gates, total, ds, db = (
        score.clamp(min=0),
        torch.zeros_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(score),
        torch.empty_like(weights),
    )
    for s, grad in enumerate(grads):
        g = grad.to(gate.dtype)
        total.addcmul_(g, weights[s]).addcmul_(g, gates[..., s, None])
        product = g * x
        ds[..., s] = product.sum(-1)
        db[s] = product.sum() if weights.ndim == 1 else product.reshape(-1, d).sum(0)
    ds *= score >= 0
    if r is not None:  # score = r <w, x>, r = 1 / sqrt(mean(x^2) + eps)
        total -= x * (r.square() * (ds * score).sum(-1, keepdim=True) / d)
        ds = ds * r
    dw = ds.reshape(-1, len(gate)).T @ x.reshape(-1, d)
    return (total + ds @ gate).to(source.dtype), db, dw


def _scores(x: Tensor, w: Tensor, eps: float | None) -> tuple[Tensor, Tensor | None]:
    """<w_o, x> or <w_o, rms(x)> for each read, (..., O), and the norm's factor (..., 1)."""
    score = x @ w.T
    if eps is None:
        return score, None
    r = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return score * r, r
