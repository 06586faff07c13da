"""The whole read of a depth window in a decoding step, one kernel call; None for what the kernel does not cover."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, empty_like

from .. import choice
from ..reference_steps import Chooser, Injection, Projections
from .call import checked, threads
from .few_tokens import UncoveredError, at, folds, stacked

if TYPE_CHECKING:
    from ...norm import RMSNorm

TOKENS = 8  # at most: beyond, and with more threads, torch's products are the better ones
_FLOAT = torch.float32
_SHARED = struct.Struct("3q 4q 2d")  # `Call` of window_step.cpp, its matrices
_CALL = struct.Struct("5q 4q d 2q 4q d 3q")  # and the rest
_INJECTIONS = {"replace": 0, "add": 1, "gated": 2, "axes": 3}


class Prepared(NamedTuple):
    """Projections as the kernel takes them; looked at once for all reads of a pass."""

    projections: Projections  # kept: the kernel has their addresses
    packed: bytes
    d: int


def runs() -> bool:
    """Whether steps of this pass are the kernel's."""
    return threads() == 1 and choice.step_kernel("window_step") is not None


def prepare(p: Projections) -> Prepared | None:
    """None where a matrix is none of the kernel's, or no kernel runs."""
    d, H = len(p.value), p.heads
    ages = 0 if p.bias is None else p.bias.shape[1]
    if d % H or not runs():
        return None
    try:
        matrices = at(p.query, H * d, d), at(p.value, d, d), at(p.output, d, d), at(p.bias, H, ages)
    except UncoveredError:
        return None
    return Prepared(p, _SHARED.pack(d, H, ages, *matrices, p.scale, p.eps), d)


def window_read(
    states: Sequence[Tensor],
    prepared: Prepared,
    *,
    injection: Injection = "add",
    gate: tuple[Tensor, Tensor] | None = None,
    s: Tensor | None = None,
    chooser: Chooser | None = None,
    share: Tensor | None = None,
    norm: RMSNorm | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """`reference_steps.window_read`, with the gain of a norm that no hook waits for."""
    library = choice.step_kernel("window_step")
    if library is None or (norm is not None and not folds(norm)) or (v := stacked(states)) is None:
        return None
    (n, *lead, d), p = v.shape, prepared.projections
    N = v.numel() // (n * d)
    reads = n == 1 or (p.query is not None and (p.bias is None or p.bias.shape[1] >= n))
    if N > TOKENS or d != prepared.d or states[-1].dtype is not _FLOAT or not reads:
        return None
    gates = len(gate[0]) if gate is not None and injection == "axes" else 1
    w = w_0 = 0
    try:
        axis, gain = at(s, *lead, d), 0 if norm is None else at(norm.weight, d)
        if gate is not None:
            w, w_0 = at(gate[0], gates, 2 * d if s is not None else d), at(gate[1], gates)
        choosing, form = _choosing(chooser, share, n, d, lead)
    except UncoveredError:
        return None
    if d % gates:
        return None
    h = states[-1]  # `empty_like` takes half the time of `empty`
    if type(h) is not Tensor or not h.is_contiguous():
        h = v[-1]
    x, y = empty_like(h), None if norm is None else empty_like(h)
    total = share if not form or share is None else empty_like(share)
    call = prepared.packed + _CALL.pack(
        N, n, form, *choosing[:2], v.data_ptr(), *choosing[2:], _INJECTIONS[injection], gates, axis, w, w_0, gain,
        0.0 if norm is None else norm.eps, x.data_ptr(), 0 if y is None else y.data_ptr(),
        0 if not form or total is None else total.data_ptr(),
    )  # fmt: skip
    checked(library.window_step(call))
    return x, y, total


def _choosing(
    chooser: Chooser | None, share: Tensor | None, n: int, d: int, lead: Sequence[int]
) -> tuple[tuple[int, int, int, int, int, float], int]:
    """most, ramp, u, c, share and part of `Call`, and its form."""
    if chooser is None:
        return (0, 0, 0, 0, 0, 0.0), 0
    weight, bias, most, ramp, part = chooser
    rows = len(weight)
    if share is None or rows < (1 if ramp else n - 1):
        raise UncoveredError
    return (most, ramp, at(weight, rows, d), at(bias, rows), at(share, *lead), part), 1 if ramp else 2
