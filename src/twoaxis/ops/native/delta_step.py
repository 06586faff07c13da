"""Deep Delta Learning's read and write in a decoding step, one kernel call each; None for what no kernel covers."""

from __future__ import annotations

import struct

import torch
from torch import Tensor, empty

from .. import choice
from ..precision import few
from .call import checked
from .delta_rewrite import CHANNELS
from .few_tokens import UncoveredError, at

_FLOAT = torch.float32
_READ = struct.Struct("4q 3q 5q 2d q 3q")  # `Call` of delta_step.cpp
_WRITE = struct.Struct("4q f4x 5q 4q")  # `Call` of delta_rewrite.cpp


def read(
    state: Tensor,
    kernel: Tensor | None,
    taps: Tensor | None,
    gain: Tensor,
    gate: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor | None],
    *,
    eps: float,
    scale: float,
    raw: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`reference_steps.delta_read`: c (..., d), v (..., m), beta (..., 1)."""
    library = choice.step_kernel("delta_step")
    if library is None or not few((state,)):
        return None
    (*lead, d), m = state.shape if kernel is None else state.shape[:-1], len(target[0])
    try:
        x = at(state, *lead, d) if kernel is None else at(state, *lead, d, m)
        width = 0 if kernel is None else kernel.shape[1]
        inputs = at(kernel, d, width), at(taps, m), at(gain, d)
        learned = at(gate[0], 1, d), at(gate[1], 1), at(target[0], m, d), at(target[1], m)
    except UncoveredError:
        return None
    c, v, beta = (empty((*lead, k), dtype=_FLOAT) for k in (d, m, 1))
    call = _READ.pack(
        beta.numel(), d, m, width, x, *inputs, *learned, eps, scale, raw, c.data_ptr(), v.data_ptr(), beta.data_ptr()
    )  # fmt: skip
    checked(library.delta_step(call))
    return c, v, beta


def write(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps: float) -> Tensor | None:
    """`delta_rewrite` of state (..., d) or (..., d, m), value (..., m) and gate (..., 1)."""
    library = choice.step_kernel("delta_rewrite")
    if library is None or not few((state,)):
        return None
    (*lead, d), m = direction.shape, state.shape[-1] if state.ndim > direction.ndim else 1
    if m not in CHANNELS:
        return None
    try:
        x = at(state, *lead, d, m) if state.ndim > direction.ndim else at(state, *lead, d)
        inputs = at(direction, *lead, d), at(value, *lead, m), at(gate, *lead, 1)
    except UncoveredError:
        return None
    out = empty(state.shape, dtype=_FLOAT)
    call = _WRITE.pack(gate.numel(), d, m, 1, eps, x, *inputs, out.data_ptr(), 0, 0, 0, 0)
    checked(library.delta_rewrite_forward(call, 0))
    return out
