"""A depthwise causal convolution over tokens, with its past and its document borders.

    y[t, c] = sum_{s=0..k-1} weight[c, k-1-s] x[t-s, c]         the last tap meets the current token

A sum of k shifted products: each tap is one multiply-add over all tokens, on views of one padded copy of x.
"""

import torch
from torch import Tensor

from .native import causal_conv as native
from .precision import compute_dtype, full_precision
from .token_checks import check_conv


def depthwise_causal_conv(
    x: Tensor, weight: Tensor, *, history: Tensor | None = None, segments: Tensor | None = None
) -> Tensor:
    """Convolve x (B, T, C..) over T with weight (C.., k); returns (B, T, C..) in x's dtype.

    The channels may be several dimensions, and those of x and weight broadcast: x (B, T, d, 1) with weight
    (d, m, k) makes m channels of each feature.

    history: (B, R, C..) the rows before x, oldest first; of them the last k-1 count. None, and whatever is
    missing, is zeros. segments: (B, R + T) document ids of history and x: a tap that reaches into another
    document reads zero, and rows with an id below 0 (padding) are zero going in and coming out.

    Sums run in at least float32. Raises InputError for shapes that do not agree.
    """
    R = check_conv(x, weight, history, segments)
    if (kernel := native.library(x, weight, history, segments)) is not None:
        convolved: Tensor = native.NativeConv.apply(kernel, x, weight, history)
        return convolved
    T, k, dtype = x.shape[1], weight.shape[-1], compute_dtype(x)
    with full_precision(x):
        rows = _with_past(x.to(dtype), None if history is None else history.to(dtype), k - 1, 0)
        ids = None if segments is None else _with_past(segments[:, R:], segments[:, :R], k - 1, -1)
        shifts = [_at(rows, ids, start, T) for start in reversed(range(k))]  # 0 .. k-1 tokens back
        taps = weight.to(dtype).unbind(-1)[::-1]
        out = shifts[0] * taps[0]
        for shifted, tap in zip(shifts[1:], taps[1:]):
            out = torch.addcmul(out, shifted, tap)
    return out.to(x.dtype)


def _with_past(new: Tensor, past: Tensor | None, count: int, fill: int) -> Tensor:
    """The last `count` rows of `past`, filled up on the left, before the new ones."""
    if count == 0:
        return new
    past = new[:, :0] if past is None else past[:, max(0, past.shape[1] - count) :]
    missing = new.new_full((new.shape[0], count - past.shape[1], *new.shape[2:]), fill)
    return torch.cat((missing, past, new), 1)


def _at(rows: Tensor, ids: Tensor | None, start: int, T: int) -> Tensor:
    """T rows from `start` on, zero where they are not of the document of the last T rows."""
    shifted = rows[:, start : start + T]
    if ids is None:
        return shifted
    own = ids[:, ids.shape[1] - T :]
    same = (ids[:, start : start + T] == own) & (own >= 0)
    return torch.where(same.reshape(*same.shape, *[1] * (rows.ndim - 2)), shifted, 0.0)
