"""Gates of a read over depth in a decoding step, one kernel call each; None for what no kernel covers."""

from __future__ import annotations

import struct

import torch
from torch import Tensor, empty

from .. import choice
from ..precision import few
from .few_tokens import UncoveredError, at

_FLOAT = torch.float32
_WINDOW = struct.Struct("4q 3q 2d 2q")  # `Window` of gates_step.cpp
_AXES = struct.Struct("3q 4q d q")  # `Axes`


def soft_window(
    h: Tensor, weight: Tensor, bias: Tensor, n: int, most: int, ramp: int, eps: float
) -> tuple[Tensor, Tensor] | None:
    """`reference_steps.soft_window`: K (B, T), and log m (n, B, T), oldest state first."""
    library = choice.step_kernel("gates_step")
    if library is None or not few((h,)):
        return None
    *lead, d = h.shape
    try:
        inputs = at(h, *lead, d), at(weight, 1, d), at(bias, 1)
    except UncoveredError:
        return None
    K, logs = empty(tuple(lead), dtype=_FLOAT), empty((n, *lead), dtype=_FLOAT)
    library.soft_window(
        _WINDOW.pack(K.numel(), d, n, most, *inputs, eps, ramp, K.data_ptr(), logs.data_ptr())
    )
    return K, logs


def axis_gate(s: Tensor, z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor | None:
    """`reference_steps.axis_gate`, like s."""
    library = choice.step_kernel("gates_step")
    if library is None or not few((s,)):
        return None
    (*lead, d), gates = s.shape, len(bias)
    if d % gates:
        return None
    try:
        inputs = at(s, *lead, d), at(z, *lead, d), at(weight, gates, 2 * d), at(bias, gates)
    except UncoveredError:
        return None
    out = empty(s.shape, dtype=_FLOAT)
    library.axis_gate(_AXES.pack(s.numel() // d, d, gates, *inputs, eps, out.data_ptr()))
    return out
