"""`few_tokens` by its kernel: one call is a whole read. Each function returns None for what the kernel does not cover.

A step's time is the interpreter's and that of cold caches, so sources are stacked, which checks and copies them in
one call, and everything else is looked at once, while its address is taken.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, empty, nn, stack

from .. import choice
from ..precision import few
from ..token_read import Options
from .call import checked

if TYPE_CHECKING:
    from ...norm import RMSNorm

SCORED, MADE, GATED = range(3)
FINISHES = {"softmax": 0, "sigmoid": 1, "none": 2, "relu": 3}
READS = ("softmax", "sigmoid", "none")
_FLOAT = torch.float32
_CALL = struct.Struct("6q 2q 2q 4q 3d 2q 2q q 2q 2q 2q q")  # `Call` of few_tokens.cpp


class UncoveredError(Exception):
    """The kernel does not cover this call."""


def at(x: Tensor | None, *shape: int) -> int:
    """The address of a contiguous float32 tensor of this shape, 0 for None. Raises UncoveredError for another one."""
    if x is None:
        return 0
    if x.shape != shape or x.dtype is not _FLOAT or not x.is_contiguous() or not choice.ordinary(x):
        raise UncoveredError
    return x.data_ptr()


def stacked(sources: Sequence[Tensor]) -> Tensor | None:
    """Sources as one tensor (n, ..., d); None if they are more than a step's, or none of the kernel's."""
    if type(sources) is not tuple or not sources or not few(sources):
        return None
    try:
        v = stack(sources)
    except RuntimeError:  # shapes that differ
        return None
    return v if v.dtype is _FLOAT and choice.ordinary(v) else None


def folds(norm: object) -> TypeGuard[RMSNorm]:
    """Whether a kernel may do a norm's work: it is ours, and no hook waits for its call."""
    from ...norm import RMSNorm  # which stands above the operators

    return type(norm) is RMSNorm and unwatched(norm)


def unwatched(module: nn.Module) -> bool:
    """Whether nobody waits for a module's call, or for a backward pass through it."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _gains(norms: Sequence[object | None], d: int) -> tuple[array[int], float]:
    """The gains of a norm for each read, or of none, and their epsilon. Raises UncoveredError for other norms."""
    gains, eps = array("q"), set()
    for norm in norms:
        if norm is None:
            gains.append(0)
            continue
        if not folds(norm):
            raise UncoveredError
        gains.append(at(norm.weight, d))
        eps.add(norm.eps)
    if len(eps) > 1:
        raise UncoveredError
    return gains, eps.pop() if eps else 0.0


def scored(
    o: Options,
    query: Tensor,
    key_gain: Tensor | None,
    output_gain: Tensor | None,
    bias: Tensor | None,
    sources: Sequence[Tensor],
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """`few_tokens.depth_read` of one head; bias (n, 1 or N). skip, like a source, is added before the output norm."""
    covered = type(o.heads) is int and o.heads == 1 and o.normalize in READS
    if not covered or (output_gain is not None and o.output_eps is None):
        return None
    library = choice.step_kernel("few_tokens")
    if library is None or (v := stacked(sources)) is None:
        return None
    n, *lead, d = v.shape
    N, static, normed = v.numel() // (n * d), query.ndim == 1, o.output_eps is not None
    tall = bias is not None and bias.shape[1] == N
    if normed and output_gain is None:
        output_gain = torch.ones(d, dtype=_FLOAT)
    try:
        x = at(query, d) if static else at(query, *lead, d)
        gain, b = at(key_gain, d), 0 if bias is None else at(bias, n, N if tall else 1)
        gains, start_h = array("q", (at(output_gain, d),)), at(skip, *lead, d)
    except UncoveredError:
        return None
    out = empty(v.shape[1:], dtype=_FLOAT)
    weights = empty((N, n), dtype=_FLOAT) if o.return_weights else None
    start, rows = out.data_ptr(), v.data_ptr()
    call = _CALL.pack(
        SCORED, n, N, d, 1, FINISHES[o.normalize], rows, rows, N * d, d,
        0 if normed else start, start if normed else 0, 0 if weights is None else weights.data_ptr(),
        gains.buffer_info()[0],
        o.output_eps or 0.0, -1.0 if o.eps is None else o.eps, o.scale,
        x, gain, 0 if static else d, d, b, N if tall else 1, tall, 0, 0, 0, 0, start_h,
    )  # fmt: skip
    checked(library.few_tokens(call))
    return out, out if weights is None else weights.t().unsqueeze(-1)


def rows_read(query: Tensor, rows: Sequence[Tensor], width: int, scale: float) -> Tensor | None:
    """sum_i softmax_i(scale <query, k_i>) v_i of rows [k_i | v_i] (..., width + d); query (..., width)."""
    library = choice.step_kernel("few_tokens")
    if library is None or (v := stacked(rows)) is None:
        return None
    n, *lead, both = v.shape
    N, d = v.numel() // (n * both), both - width
    if not query.is_contiguous():
        query = query.contiguous()
    try:
        x = at(query, *lead, width)
    except UncoveredError:
        return None
    out, keys = empty((*lead, d), dtype=_FLOAT), v.data_ptr()
    call = _CALL.pack(
        SCORED, n, N, d, 1, FINISHES["softmax"], keys + 4 * width, keys, N * both, both,
        out.data_ptr(), 0, 0, 0, 0.0, -1.0, scale, x, 0, width, width, 0, 0, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    checked(library.few_tokens(call))
    return out


def made(
    sources: Sequence[Tensor],
    x: Tensor,
    up: Tensor,
    bias: Tensor,
    *,
    eps: float,
    finish: str = "none",
    gain: Tensor | None = None,
    down: Tensor | None = None,
    gelu: str = "erf",
    norms: Sequence[object | None] = (),
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """`reference_steps.made_mix`, and each read after its norm; where that is None there is nothing to use."""
    library = choice.step_kernel("few_tokens")
    if library is None or (v := stacked(sources)) is None:
        return None
    n, *lead, d = v.shape
    N, width, R, hidden = v.numel() // (n * d), x.shape[-1], len(up) // n, 0 if down is None else len(down)
    try:
        inputs = at(x, *lead, width), at(gain, width)
        matrices = at(bias, *bias.shape), at(down, hidden, width), at(up, R * n, hidden or width)
        gains, output_eps = _gains(norms, d)
    except UncoveredError:
        return None
    out = empty((R + len(gains), *v.shape[1:]), dtype=_FLOAT)
    start = out.data_ptr()
    rows, (b, W_down, W_up) = v.data_ptr(), matrices
    call = _CALL.pack(
        MADE, n, N, d, R, FINISHES[finish], rows, rows, N * d, d,
        start, start + 4 * R * N * d if gains else 0, 0, gains.buffer_info()[0],
        output_eps, eps, 1.0, *inputs, width, width, b, 0, 0, W_down, W_up, hidden, gelu == "tanh", 0,
    )  # fmt: skip
    checked(library.few_tokens(call))
    made = out.unbind()
    return made[:R], made[R:]


def gated(
    sources: Sequence[Tensor],
    weights: Tensor,
    gate: Tensor,
    eps: float | None,
    norms: Sequence[object | None] = (),
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
    """`few_tokens.gated_mix`, and its reads after their norms, as in `made`."""
    library = choice.step_kernel("few_tokens")
    if library is None or (v := stacked(sources)) is None:
        return None
    (n, *_, d), R = v.shape, len(gate)
    N = v.numel() // (n * d)
    try:
        w, b = at(gate, R, d), at(weights, R, n, *weights.shape[2:])
        gains, output_eps = _gains(norms, d)
    except UncoveredError:
        return None
    out = empty((R + len(gains), *v.shape[1:]), dtype=_FLOAT)
    start = out.data_ptr()
    rows = v.data_ptr()
    call = _CALL.pack(
        GATED, n, N, d, R, FINISHES["none"], rows, rows, N * d, d,
        start, start + 4 * R * N * d if gains else 0, 0, gains.buffer_info()[0],
        output_eps, -1.0 if eps is None else eps, 1.0, w, 0, 0, d, b, 0, weights.ndim == 3, 0, 0, 0, 0, 0,
    )  # fmt: skip
    checked(library.few_tokens(call))
    made = out.unbind()
    return made[:R], made[R:]
