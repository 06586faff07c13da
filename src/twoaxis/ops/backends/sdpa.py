"""Windowed attention by torch's scaled_dot_product_attention: its causal kernel, or a boolean mask."""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..precision import full_precision
from ..window import visible
from .plan import kept_keys


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    segments: Tensor | None,
    sink_tokens: int,
) -> Tensor:
    """`local_attention` on checked arguments; rows of padded queries are finite and not yet zero.

    The mask costs O(Tq kept keys). One query without segments sees all it keeps and needs none. torch aligns
    is_causal top-left, so it serves only Tq = Tk.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    kept = Tk if sink_tokens and segments is not None else kept_keys(Tq, Tk, window)
    dropped = Tk - kept
    early = min(sink_tokens, dropped)  # sink tokens before the kept keys: all queries see them
    if dropped:
        k, v = (torch.cat([x[:, :, :early], x[:, :, dropped:]], dim=2) for x in (k, v))
        segments = None if segments is None else segments[:, dropped:]
    mask, causal = None, False
    if segments is None and not early and Tq == kept and (window is None or window >= kept):
        causal = True
    elif segments is not None or Tq > 1:
        mask = visible(Tq, kept, window, segments, sink_tokens - early).to(q.device)
        mask = pad(mask, (early, 0), value=True)
    if segments is not None and mask is not None:
        own = torch.arange(kept, device=q.device) == torch.arange(kept - Tq, kept, device=q.device)[:, None]
        padded = (segments[:, kept - Tq :] < 0)[..., None]
        mask = (mask | (own & padded))[:, None]  # a row that sees nothing is NaN in some kernels
    grouped = q.shape[1] != k.shape[1]
    with full_precision(q):  # autocast would round q, k and v
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
