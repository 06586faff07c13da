"""The papers' equations in plain PyTorch: the oracle of every fast path, in any float dtype, on any device.

Same names and signatures as `twoaxis.ops`. Memory and speed do not matter here; double backward works.
"""

from collections.abc import Sequence
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from .channel_read import check_channel_read
from .checks import (
    Bias,
    Normalize,
    ReadOptions,
    Weights,
    check_attention,
    check_conv,
    check_mix,
    check_read,
    check_rewrite,
    check_streams,
    source_dtype,
)
from .gated_mix import check_gated_mix
from .precision import compute_dtype, full_precision
from .sinkhorn import Last, check_sinkhorn
from .window import visible


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension without gain: x / sqrt(mean(x^2) + eps), same shape and dtype."""
    with full_precision(x):
        v = x.to(compute_dtype(x))
        return (v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6, *, dtype: torch.dtype | None = None) -> Tensor:
    """gain x / sqrt(mean(x^2) + eps), rounded once to `dtype` (None: x's)."""
    with full_precision(x):
        v = x.to(compute_dtype(x))
        y = gain.to(v.dtype) * v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y.to(x.dtype if dtype is None else dtype)


def add_rms_norm(
    x: Tensor, branch: Tensor, gain: Tensor, eps: float = 1e-6, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch in x's dtype, and `rms_norm` of it."""
    total = x + branch.to(x.dtype)
    return total, rms_norm(total, gain, eps, dtype=dtype)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x (..., 2 h), the gate's numbers first."""
    with full_precision(x):
        gate, up = x.to(compute_dtype(x)).chunk(2, -1)
        return (gate * gate.sigmoid() * up).to(x.dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """sum_i log sum_v e^(z_iv) - z_i,t(i) over targets that are not -100."""
    z, t = logits.to(compute_dtype(logits)), targets.clamp(min=0).unsqueeze(-1)
    losses = z.logsumexp(-1) - z.gather(-1, t).squeeze(-1)
    return losses.masked_fill(targets == -100, 0.0).sum()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x_i + j x_{i+R}) e^(j angle) for i < R, of x (B, T, H, D) and angles (..., T, 1, R); the rest as it is."""
    with full_precision(x):
        (a, b), rest = x.to(cos.dtype)[..., : 2 * cos.shape[-1]].chunk(2, -1), x[..., 2 * cos.shape[-1] :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    sink_logits: Tensor | None = None,
    sink_tokens: int = 0,
    position_bias: Tensor | None = None,
    reach: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """softmax(scale q k^T + bias) v over the visible keys, by a dense mask; see `ops.local_attention`.

    `backend` is part of the shared signature and plays no role here.
    """
    check_attention(q, k, v, window, segments, sink_logits, sink_tokens, position_bias, reach)
    group, Tq, Tk = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    dtype = compute_dtype(q)
    with full_precision(q):
        keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))  # (B, H, Tk, D)
        logits = (q.shape[-1] ** -0.5 if scale is None else scale) * (q.to(dtype) @ keys.mT)
        if position_bias is not None:
            at = torch.arange(Tk, device=q.device)
            distance = at[Tk - Tq :, None] - at  # (Tq, Tk)
            inside = (distance >= 0) & (distance < position_bias.shape[1])
            logits = logits + torch.where(inside, position_bias.to(dtype)[:, distance * inside], 0.0)
        mask = visible(Tq, Tk, window, segments, sink_tokens, reach).to(q.device)
        mask = mask if mask.ndim == 2 else mask[:, None]  # (B, 1, Tq, Tk)
        nothing = ~mask.any(-1, keepdim=True)  # padded queries
        logits = logits.masked_fill(~mask & ~nothing, -torch.inf)
        if sink_logits is not None:  # one more column, without a value
            sink = sink_logits.to(dtype)[:, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(-1)[..., :Tk].masked_fill(nothing, 0.0)
        return (weights @ values).to(q.dtype)


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


def delta_rewrite(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps: float) -> Tensor:
    """X + gate k (v^T - k^T X) with k = h / sqrt(|h|^2 + eps^2); see `ops.delta_rewrite`."""
    expanded = check_rewrite(state, direction, value, gate)
    dtype = compute_dtype(state, direction)
    lead = direction.shape[:-1]
    with full_precision(state):
        h = direction.to(dtype)
        k = (h / (h.square().sum(-1, keepdim=True) + eps**2).sqrt()).unsqueeze(-1)  # (..., d, 1)
        X = state.to(dtype) if expanded else state.to(dtype).unsqueeze(-1)  # (..., d, m)
        v = value.to(dtype).reshape(*lead, 1, X.shape[-1])
        out = X + gate.to(dtype).reshape(*lead, 1, 1) * k * (v - k.mT @ X)
    return out.reshape(state.shape).to(state.dtype)


def channel_read(state: Tensor, weights: Tensor) -> Tensor:
    """u_i = sum_v W[i, v] X[.., i, v]; see `ops.channel_read`."""
    check_channel_read(state, weights)
    dtype = compute_dtype(state)
    with full_precision(state):
        return (state.to(dtype) * weights.to(dtype)).sum(-1).to(state.dtype)


def stream_scores(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """layer_norm(X_s) W; see `ops.stream_scores`."""
    check_streams(streams, matrix=matrix)
    with full_precision(streams):
        X = streams.to(compute_dtype(streams))
        centred = X - X.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() @ matrix.to(X.dtype)


def joint_scores(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """vec(X) W / rms(vec(X)); see `ops.joint_scores`."""
    check_streams(streams, joint=matrix)
    with full_precision(streams):
        x = streams.to(compute_dtype(streams)).flatten(-2)
        return rms(x, eps) @ matrix.to(x.dtype)


def stream_read(
    streams: Tensor, weights: Tensor, *, gain: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """sum_s w_s X_s and its norm; see `ops.stream_read`."""
    check_streams(streams, weights=weights, gain=gain)
    with full_precision(streams):
        X = streams.to(compute_dtype(streams))
        h = (weights.to(X.dtype).unsqueeze(-1) * X).sum(-2)
        if eps is not None:
            h = rms(h, eps) if gain is None else rms(h, eps) * gain.to(h.dtype)
    return h.to(streams.dtype)


def stream_write(streams: Tensor, mixing: Tensor | None, weights: Tensor, branch: Tensor) -> Tensor:
    """X'_t = sum_s M_ts X_s + b_t y; see `ops.stream_write`."""
    check_streams(streams, mixing=mixing, weights=weights, branch=branch)
    dtype = compute_dtype(streams, branch)
    with full_precision(streams):
        X, y = streams.to(dtype), branch.to(dtype).unsqueeze(-2)
        mixed = X if mixing is None else (mixing.to(dtype).unsqueeze(-1) * X.unsqueeze(-3)).sum(-2)
        return (mixed + weights.to(dtype).unsqueeze(-1) * y).to(streams.dtype)


def depthwise_causal_conv(
    x: Tensor, weight: Tensor, *, history: Tensor | None = None, segments: Tensor | None = None
) -> Tensor:
    """y[t] = sum_s weight[.., k-1-s] x[t-s] within a document; see `ops.depthwise_causal_conv`."""
    R, k, dtype = check_conv(x, weight, history, segments), weight.shape[-1], compute_dtype(x)
    with full_precision(x):
        rows = x.to(dtype) if history is None else torch.cat([history.to(dtype), x.to(dtype)], dim=1)
        shape = torch.broadcast_shapes(x.shape[2:], weight.shape[:-1])
        out = []
        for t in range(R, rows.shape[1]):
            y = torch.zeros((x.shape[0], *shape), dtype=dtype, device=x.device)
            for s in range(min(k, t + 1)):
                term = weight[..., k - 1 - s].to(dtype) * rows[:, t - s]
                if segments is not None:
                    same = (segments[:, t - s] == segments[:, t]) & (segments[:, t] >= 0)
                    term = torch.where(same.reshape(-1, *[1] * len(shape)), term, 0.0)
                y = y + term
            out.append(y)
        result = torch.stack(out, dim=1) if out else x.new_zeros((x.shape[0], 0, *shape))
    return result.to(x.dtype)


def sinkhorn(logits: Tensor, iterations: int = 20, *, last: Last = "rows", eps: float = 0.0) -> Tensor:
    """H from exp(R) by dividing columns and rows by their sums in turn; see `ops.sinkhorn`."""
    check_sinkhorn(logits, iterations, last, eps)
    over = (-2, -1) if last == "rows" else (-1, -2)
    with full_precision(logits):
        R = logits.to(compute_dtype(logits))
        if not iterations:
            return R.softmax(over[1])
        if eps:
            H = R.softmax(over[0]) + eps
            H = H / (H.sum(over[1], keepdim=True) + eps)
            for _ in range(iterations - 1):
                for dim in over:
                    H = H / (H.sum(dim, keepdim=True) + eps)
            return H
        for _ in range(iterations):
            for dim in over:
                R = R - R.logsumexp(dim, keepdim=True)
        return R.exp()
