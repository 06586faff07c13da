"""Between layers, from many sources to one: the read by attention and the weighted sums."""

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from ..checks import (
    Bias,
    Normalize,
    ReadOptions,
    Weights,
    check_head_mix,
    check_mix,
    check_read,
    source_dtype,
)
from ..gated_mix import check_gated_mix
from ..precision import compute_dtype, full_precision
from .model import rms


@overload
def depth_read(
    query: Tensor,
    sources: Sequence[Tensor],
    *,
    return_weights: Literal[False] = ...,
    **options: Unpack[ReadOptions],
) -> Tensor: ...
@overload
def depth_read(
    query: Tensor, sources: Sequence[Tensor], *, return_weights: Literal[True], **options: Unpack[ReadOptions]
) -> tuple[Tensor, Tensor]: ...
def depth_read(
    query: Tensor,
    sources: Sequence[Tensor],
    *,
    key_gain: Tensor | None = None,
    key_norm_eps: float | None = 1e-6,
    scale: float = 1.0,
    normalize: Normalize = "softmax",
    heads: int = 1,
    output_gain: Tensor | None = None,
    output_eps: float | None = None,
    bias: Bias | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_i a_i v_i, a = normalize_i(scale <query, key_gain * rms(v_i)> + bias_i); see `ops.depth_read`."""
    check_read(query, sources, key_gain, normalize, heads, output_gain, output_eps, bias)
    dtype, result = compute_dtype(*sources), source_dtype(sources)
    with full_precision(sources[0]):
        v = torch.stack([x.to(dtype) for x in sources], dim=-2)  # (..., n, d)
        key = v if key_norm_eps is None else rms(v, key_norm_eps)
        key = key if key_gain is None else key * key_gain.to(dtype)
        # the key norm is over the full d; the heads split what follows: (..., n, heads, d / heads)
        split = (heads, v.shape[-1] // heads)
        logits = scale * (query.to(dtype).unsqueeze(-2) * key).unflatten(-1, split).sum(-1)  # (..., n, heads)
        if bias is not None:
            rows = [torch.as_tensor(b, dtype=dtype, device=v.device).expand(v.shape[:-2]) for b in bias]
            logits = logits + torch.stack(rows, dim=-1)[..., None]
        weights = _normalize(logits, normalize)
        out = (weights[..., None] * v.unflatten(-1, split)).sum(-3).flatten(-2)
        if output_eps is not None:
            out = rms(out, output_eps)
            out = out if output_gain is None else out * output_gain.to(dtype)
    out = out.to(result)
    return (out, weights.squeeze(-1) if heads == 1 else weights.mT) if return_weights else out


def _normalize(logits: Tensor, normalize: Normalize) -> Tensor:
    """Weights over the sources, dimension -2. A source at -inf has weight 0, also when all of them are."""
    if normalize == "softmax":
        nothing = (logits == -torch.inf).all(-2, keepdim=True)
        return logits.masked_fill(nothing, 0.0).softmax(-2).masked_fill(nothing, 0.0)
    if normalize == "sigmoid":
        return logits.sigmoid()
    return logits.masked_fill(logits == -torch.inf, 0.0)


def mix(sources: Sequence[Tensor], weights: Weights) -> Tensor:
    """sum_j w_j x_j with weights (n,), (n, d) or one tensor per source; see `ops.mix`."""
    rows = check_mix(sources, weights)
    dtype = compute_dtype(*sources)
    with full_precision(sources[0]):
        total = torch.zeros((), dtype=dtype, device=sources[0].device)
        for x, w in zip(sources, rows):
            total = total + w.to(dtype) * x.to(dtype)
    return total.to(source_dtype(sources))


def token_mix(sources: Sequence[Tensor], weights: Tensor) -> tuple[Tensor, ...]:
    """sum_j w_oj x_j for each o of weights (..., O, n); see `ops.token_mix`."""
    return tuple(mix(sources, row.unbind(-1)) for row in weights.unbind(-2))


def head_mix(sources: Sequence[Tensor], weight: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """sum_m sum_g R[h, (m, g)] [x_m]_g of heads of sources (..., D, H_m), cut by widths; see `ops.head_mix`."""
    check_head_mix(sources, weight, widths)
    dtype = compute_dtype(*sources)
    with full_precision(sources[0]):
        mixed = torch.cat([x.to(dtype) for x in sources], -1) @ weight.to(dtype).mT
    return mixed.to(source_dtype(sources)).mT.split(list(widths), -1)


def gated_mix(
    sources: Sequence[Tensor], weights: Tensor, gate: Tensor, *, norm_eps: float | None = None
) -> tuple[Tensor, ...]:
    """g_o = sum_i (b_oi + relu(<w_o, v_i>)) v_i, relu with slope 1 at 0; see `ops.gated_mix`."""
    check_gated_mix(sources, weights, gate)
    dtype, reads = compute_dtype(*sources), []
    with full_precision(sources[0]):
        for b, w in zip(weights.to(dtype), gate.to(dtype)):
            total = torch.zeros((), dtype=dtype, device=w.device)
            for i, source in enumerate(sources):
                x = source.to(dtype)
                scored = x if norm_eps is None else rms(x, norm_eps)
                total = total + (b[i] + (scored @ w).clamp(min=0)[..., None]) * x
            reads.append(total.to(source_dtype(sources)))
    return tuple(reads)
