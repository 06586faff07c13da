"""What methods of several streams read in a decoding step, by a kernel; None for what it does not cover."""

from __future__ import annotations

import struct

import torch
from torch import Tensor, empty

from .. import choice
from ..precision import few
from .call import checked
from .few_tokens import UncoveredError, at

_FLOAT = torch.float32
_MHC = struct.Struct("6q 5q 3d 3q")  # `MHC` of streams_step.cpp
_HYPER = struct.Struct("4q 6q 2d 3q")  # `Hyper`


def mhc_read(
    streams: Tensor,
    phi: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    gain: Tensor,
    *,
    iterations: int,
    rows_last: bool,
    norm_eps: float,
    output_eps: float,
    write_scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """h (B, T, d), Q (N, n, 1), H X (N, n, d) of `reference_steps.mhc_read`; streams (B, T, n, d), n at most 8."""
    library = choice.step_kernel("streams_step")
    if library is None or scales is None or bias is None or not few((streams,)):
        return None
    B, T, n, d = streams.shape
    groups, C = len(scales), len(bias)
    if n > 8 or (groups, C) not in ((2, 2 * n), (3, 2 * n + n * n)) or not iterations:
        return None
    try:
        inputs = (
            at(streams, B, T, n, d), at(phi, n * d, C), at(scales, groups), at(bias, C), at(gain, d),
        )  # fmt: skip
    except UncoveredError:
        return None
    h, Q, mixed = (empty(s, dtype=_FLOAT) for s in ((B, T, d), (B * T, n, 1), (B * T, n, d)))
    call = _MHC.pack(
        B * T, n, d, groups == 3, iterations, rows_last, *inputs,
        norm_eps, output_eps, write_scale, h.data_ptr(), Q.data_ptr(), mixed.data_ptr(),
    )  # fmt: skip
    failed = library.mhc_step(call)
    if failed == 2:
        return None
    checked(failed)
    return h, Q, mixed


def hyper_read(
    streams: Tensor,
    fixed: Tensor,
    dynamic: Tensor,
    scales: tuple[Tensor, Tensor],
    gain: Tensor,
    *,
    tanh: bool,
    norm_eps: float,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`reference_steps.hyper_read`: h (B, T, d), B (N, n, 1), A_r^T X (N, n, d); streams (B, T, n, d)."""
    library = choice.step_kernel("streams_step")
    if library is None or not few((streams,)):
        return None
    B, T, n, d = streams.shape
    try:
        inputs = at(streams, B, T, n, d), at(fixed, n, n + 2), at(dynamic, d, n + 2)
        learned = at(scales[0]), at(scales[1]), at(gain, d)
    except UncoveredError:
        return None
    h, write, mixed = (empty(s, dtype=_FLOAT) for s in ((B, T, d), (B * T, n, 1), (B * T, n, d)))
    call = _HYPER.pack(
        B * T, n, d, tanh, *inputs, *learned, norm_eps, output_eps, h.data_ptr(), write.data_ptr(), mixed.data_ptr()
    )  # fmt: skip
    checked(library.hyper_step(call))
    return h, write, mixed
