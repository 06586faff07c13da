"""mHC's read in a decoding step by its kernel; None for what it does not cover."""

from __future__ import annotations

import struct

import torch
from torch import Tensor, empty

from .. import choice
from ..precision import few
from .call import checked
from .few_tokens import UncoveredError, at

_FLOAT = torch.float32
_CALL = struct.Struct("6q 5q 3d 3q")  # `Call` of mhc_step.cpp


def read(
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
    library = choice.step_kernel("mhc_step")
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
    call = _CALL.pack(
        B * T, n, d, groups == 3, iterations, rows_last, *inputs,
        norm_eps, output_eps, write_scale, h.data_ptr(), Q.data_ptr(), mixed.data_ptr(),
    )  # fmt: skip
    failed = library.mhc_step(call)
    if failed == 2:
        return None
    checked(failed)
    return h, Q, mixed
