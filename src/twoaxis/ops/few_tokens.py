"""The operators of the depth axis on the few tokens of a decoding step, where calls cost more than copies.

Sources are stacked, so that one product does what a loop over them does for many tokens. No gradients. Shapes:
N tokens, n sources of width d, H heads, O reads.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from .precision import cast, full_precision

if TYPE_CHECKING:
    from .token_read import Options


def stacked(sources: Sequence[Tensor]) -> tuple[Tensor, torch.dtype]:
    """Sources (..., d) as one (N, n, d) in the compute dtype, and the dtype that holds them all."""
    *lead, d = sources[0].shape
    v = torch.stack(tuple(sources), -2).view(prod(lead), len(sources), d)
    return (v if v.dtype == torch.float64 else cast(v, torch.float32)), v.dtype


def depth_read(
    o: "Options",
    query: Tensor,
    key_gain: Tensor | None,
    output_gain: Tensor | None,
    bias: Tensor | None,
    sources: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The read, like a source, and its weights (n, N, H); bias (n, 1 or N)."""
    shape, d, H = sources[0].shape, sources[0].shape[-1], o.heads
    with full_precision(sources[0]):
        v, dtype = stacked(sources)
        w = cast(query, v.dtype) if key_gain is None else cast(query, v.dtype) * cast(key_gain, v.dtype)
        logits = _dots(v, w, H)  # (N, n, H)
        scale = o.scale
        if o.eps is not None:  # 1 / sqrt(mean(v^2) + eps)
            lengths = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
            logits = logits * lengths.square_().add_(d * o.eps).rsqrt_()
            scale *= d**0.5
        a = _weights(o, logits if scale == 1 else logits * scale, bias)
        read = torch.bmm(a.mT, v) if H == 1 else (v.unflatten(-1, (H, -1)) * a[..., None]).sum(1)
        read = read.view(shape)
        if o.output_eps is not None:
            gain = None if output_gain is None else cast(output_gain, v.dtype)
            read = rms_norm(read, (d,), gain, o.output_eps)
    return cast(read, dtype), a.transpose(0, 1)


def _dots(v: Tensor, w: Tensor, H: int) -> Tensor:
    """<w, v_i> per head, (N, n, H), for w (d,) or (..., d)."""
    if H == 1 and w.ndim == 1:
        return torch.matmul(v, w).unsqueeze(-1)
    w = w if w.ndim == 1 else w.reshape(len(v), -1, 1)  # (N, d, 1)
    if H == 1:
        return torch.bmm(v, w)
    return (v * (w if w.ndim == 1 else w.mT)).unflatten(-1, (H, -1)).sum(-1)


def _weights(o: "Options", logits: Tensor, bias: Tensor | None) -> Tensor:
    """Normalised over the sources, (N, n, H)."""
    hidden: Tensor | None = None
    if bias is not None:
        bias = cast(bias, logits.dtype).mT.unsqueeze(-1)
        logits, hidden = logits + bias, bias == -torch.inf
    if o.normalize == "softmax":
        a = logits.softmax(1)
        return a if hidden is None else a.masked_fill(hidden.all(1, keepdim=True), 0.0)
    if o.normalize == "sigmoid":
        return logits.sigmoid()
    return logits if hidden is None else logits.masked_fill(hidden, 0.0)


def mix(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_j w_j x_j, like a source; weights (n,) or (n, d)."""
    shape = sources[0].shape
    with full_precision(sources[0]):
        v, dtype = stacked(sources)
        w = cast(weights, v.dtype)
        total = torch.matmul(w, v) if w.ndim == 1 else (v * w).sum(1)
    return cast(total.view(shape), dtype)


def token_mix(sources: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    """O sums, each like a source; weights (..., O, n)."""
    shape = sources[0].shape
    with full_precision(sources[0]):
        v, dtype = stacked(sources)
        w = cast(weights, v.dtype).reshape(len(v), -1, len(sources))
        reads = cast(torch.bmm(w, v), dtype)
    return tuple(read.view(shape) for read in reads.unbind(1))


def gated_mix(
    sources: Sequence[Tensor], weights: Tensor, gate: Tensor, eps: float | None
) -> tuple[Tensor, ...]:
    """O reads sum_i (b_oi + relu(<w_o, v_i>)) * v_i; weights b (O, n) or (O, n, d), gate w (O, d)."""
    shape = sources[0].shape
    with full_precision(sources[0]):
        v, dtype = stacked(sources)
        b, w = cast(weights, v.dtype), cast(gate, v.dtype)
        gates = torch.matmul(v, w.mT)  # (N, n, O)
        if eps is not None:
            lengths = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
            gates = gates * lengths.square_().div_(shape[-1]).add_(eps).rsqrt_()
        gates = gates.clamp_(min=0).mT  # (N, O, n)
        one = b.ndim == 2
        reads = torch.bmm(gates + b, v) if one else ((b + gates.unsqueeze(-1)) * v.unsqueeze(1)).sum(2)
        reads = cast(reads, dtype)
    return tuple(read.reshape(shape) for read in reads.unbind(1))
