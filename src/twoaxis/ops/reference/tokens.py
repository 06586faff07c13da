"""Between positions: the one operator by a dense mask, and convolution by its sum."""

import torch
from torch import Tensor

from ..precision import compute_dtype, full_precision
from ..token_checks import check_attention, check_conv
from ..window import visible


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
