"""What the operators over tokens accept: every refusal in one line, before any tensor work."""

from numbers import Integral

from torch import Tensor

from ..errors import InputError
from .checks import check_floating, shape_of
from .window import check_window


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: object,
    segments: Tensor | None,
    sink_logits: Tensor | None,
    sink_tokens: object,
    position_bias: Tensor | None,
    reach: Tensor | None = None,
) -> int | None:
    """Refuse inputs that `local_attention` does not define; returns the checked window."""
    window = check_window(window)
    if isinstance(sink_tokens, bool) or not isinstance(sink_tokens, Integral) or sink_tokens < 0:
        raise InputError(
            f"sink_tokens={sink_tokens!r}: give an integer >= 0, the number of first tokens kept visible"
        )
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise InputError(
            f"q {shape_of(q)}, k {shape_of(k)}, v {shape_of(v)}: give q (B, H, Tq, D), k and v (B, Hkv, Tk, D)"
        )
    (B, H, Tq, D), (_, Hkv, Tk, _) = q.shape, k.shape
    if k.shape[0] != B or k.shape[3] != D or Tq > Tk:
        raise InputError(
            f"q {shape_of(q)}, k {shape_of(k)}: B and D must agree; the queries are the last Tq <= Tk positions"
        )
    if Hkv == 0 or H % Hkv:
        raise InputError(f"{H} query heads, {Hkv} key heads: the key heads must divide the query heads")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InputError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: give one floating-point dtype; cast before")
    if segments is not None and (segments.shape != (B, Tk) or segments.dtype.is_floating_point):
        raise InputError(
            f"segments {shape_of(segments)} {segments.dtype}: give integer ids of shape (B, Tk) = ({B}, {Tk})"
        )
    if sink_logits is not None and sink_logits.shape != (H,):
        raise InputError(f"sink_logits {shape_of(sink_logits)}: give one logit per query head, shape ({H},)")
    if position_bias is not None and window is None:
        raise InputError("position_bias with window=None: a bias by distance needs a finite window")
    if position_bias is not None and position_bias.shape != (H, window):
        raise InputError(
            f"position_bias {shape_of(position_bias)}: give one per distance, (H, window) = ({H}, {window})"
        )
    if reach is not None and (reach.shape not in ((Tq,), (B, Tq)) or reach.dtype.is_floating_point):
        raise InputError(
            f"reach {shape_of(reach)} {reach.dtype}: give integers, one per query: ({Tq},) or ({B}, {Tq})"
        )
    if reach is not None and window is None:
        raise InputError("reach with window=None: give the largest reach as the window")
    return window


def check_conv(x: Tensor, weight: Tensor, history: Tensor | None, segments: Tensor | None) -> int:
    """Refuse what `depthwise_causal_conv` does not define; returns the number of rows of history."""
    check_floating("x", x)
    channels = weight.shape[:-1]
    fits = x.ndim == weight.ndim + 1 and weight.ndim >= 2 and weight.shape[-1] >= 1
    if not fits or any(a != b and 1 not in (a, b) for a, b in zip(x.shape[2:], channels)):
        raise InputError(
            f"x {shape_of(x)}, weight {shape_of(weight)}: give (B, T, C..) and (C.., k) with k >= 1"
        )
    if history is not None and (history.shape[:1], history.shape[2:]) != (x.shape[:1], x.shape[2:]):
        raise InputError(f"history {shape_of(history)}: give (B, R, C..) for x {shape_of(x)}")
    R = 0 if history is None else history.shape[1]
    if segments is not None and (
        segments.shape != (x.shape[0], R + x.shape[1]) or segments.dtype.is_floating_point
    ):
        raise InputError(
            f"segments {shape_of(segments)} {segments.dtype}: give integer ids of history and x, "
            f"({x.shape[0]}, {R + x.shape[1]})"
        )
    return R
