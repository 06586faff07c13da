"""A write of streams and what the next sublayer takes of them by one kernel, forward."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import CDLL
from typing import NamedTuple

import torch
from torch import Tensor

from .. import choice
from . import stream_gates
from .call import address, checked, threads
from .stream_gates import MOST, Form, Gates

_FLOAT = torch.float32
_CALL = struct.Struct("7q f 4x 10P 3q 2f 9P")  # `Call` of stream_pass.cpp


class Taking(NamedTuple):
    """How a sublayer takes of its streams: what makes scores, gates and the read.

    matrix: W (d, n + 2) for scores of each stream, or phi (n d, c) for joint ones, of mHC. table, scales: of the gates
    (`ops.stream_gates`). eps: of the scores' norm. gain (d,), read_eps: of the read's."""

    form: Form
    matrix: Tensor
    table: Tensor
    scales: tuple[Tensor, ...]
    gain: Tensor | None
    eps: float
    read_eps: float

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """All parameters, in the order of the fields."""
        return (self.matrix, self.table, *self.scales, self.gain)

    @property
    def options(self) -> tuple[Form, float, float]:
        """All else."""
        return self.form, self.eps, self.read_eps


class Made(NamedTuple):
    """What was taken: scores z, for joint ones their factor r (..., 1), gates and the read h (..., d)."""

    scores: Tensor
    factor: Tensor | None
    gates: Gates
    read: Tensor


def library(streams: Tensor, branch: Tensor, taking: Taking, *others: Tensor) -> CDLL | None:
    """The kernel for these streams, or None: the branch must not need a wider dtype than theirs."""
    if torch.promote_types(streams.dtype, branch.dtype) != streams.dtype:
        return None
    if not streams.numel() or streams.shape[-2] > MOST:
        return None
    return choice.kernel("stream_pass", (streams,), (branch, *others, *taking.learned))


def run(
    lib: CDLL, streams: Tensor, mixing: Tensor, weights: Tensor, branch: Tensor, taking: Taking
) -> tuple[Tensor, Made] | None:
    """X' = M X + b y and what is taken of it; None where logits are too far apart for the kernel."""
    *lead, n, d = streams.shape
    form, dtype, joint = taking.form, streams.dtype, taking.form.mhc
    c = taking.matrix.shape[1]
    z = torch.empty(*lead, c) if joint else torch.empty(*lead, n, c)
    gates = stream_gates.results(form, z)
    out, read = torch.empty(streams.shape, dtype=dtype), torch.empty(*lead, d, dtype=dtype)
    factor = torch.empty(*lead, 1) if joint else None
    inputs = [
        streams.contiguous(), branch.to(dtype).contiguous(), _small(mixing, (*lead, n, n)), _small(weights, (*lead, n)),
        _small(taking.matrix.T, taking.matrix.T.shape),
    ]  # fmt: skip
    gain = None if taking.gain is None else _small(taking.gain, (d,))
    learned = stream_gates.parameters(taking.table, taking.scales)
    threads_ = max(1, min(threads(), streams.numel() // (64 * n * d)))
    call = _CALL.pack(
        *stream_gates.fields(form, threads_, z, learned, gates), 0, 0, d, c, joint, taking.eps, taking.read_eps,
        address(inputs[0], dtype, streams.shape), address(inputs[1], dtype, (*lead, d)),
        *(address(x, _FLOAT, x.shape) for x in inputs[2:]), address(gain, _FLOAT, (d,)) or 0,
        out.data_ptr(), read.data_ptr(), 0 if factor is None else factor.data_ptr(),
    )  # fmt: skip
    failed = lib.stream_pass(call, int(dtype == torch.bfloat16))
    checked(failed == 1)
    return None if failed else (out, Made(z, factor, gates, read))


def _small(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.to(_FLOAT).expand(shape).contiguous()
