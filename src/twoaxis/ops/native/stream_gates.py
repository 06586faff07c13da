"""The gates of several streams by their kernel; each function does what its plain twin in `ops` does."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import CDLL
from typing import NamedTuple

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, threads

_FLOAT = torch.float32
_CALL = struct.Struct("7q f 4x 10P")  # `GatesCall` of gates.h
MOST = 8  # streams
_HYPER, _MHC = 0, 2  # and one more for backward
Fields = tuple[int | float | None, ...]
Gates = tuple[Tensor, Tensor, Tensor | None]  # read (..., n), write (..., n), mixing (..., n, n)


class Form(NamedTuple):
    """Which gates: of mHC or of Hyper-Connections, of n streams. tanh is for these, the rest for those."""

    mhc: bool
    n: int
    tanh: bool = False
    iterations: int = 0
    rows_last: bool = True
    write_scale: float = 1.0


def library(form: Form, scores: Tensor, *learned: Tensor) -> CDLL | None:
    """The kernel for these scores, or None."""
    if scores.dtype != _FLOAT or not scores.numel() or form.n > MOST:
        return None
    return choice.kernel("stream_gates", (scores,), learned)


def forward(lib: CDLL, form: Form, scores: Tensor, table: Tensor, scales: Sequence[Tensor]) -> Gates | None:
    """The gates; None where logits of a mixing are too far apart for the kernel."""
    gates = results(form, scores)
    return gates if _run(lib, form, scores, table, scales, gates) else None


def backward(
    lib: CDLL, form: Form, scores: Tensor, table: Tensor, scales: Sequence[Tensor], grads: Gates
) -> tuple[Tensor, Tensor]:
    """Gradients of the scores, and (table + 3,) of the table and the scales; of gates that the kernel has made."""
    read, write, mixing = grads
    given = read.contiguous(), write.contiguous(), None if mixing is None else mixing.contiguous()
    dscores = torch.empty(scores.shape)
    sums = torch.zeros(_threads(scores, form), table.numel() + 3, dtype=torch.float64)
    if not _run(lib, form, scores, table, scales, given, dscores, sums):
        raise RuntimeError("scores or parameters of gates were changed in place before backward")
    return dscores, sums[0] if len(sums) == 1 else sums.sum(0)


def _run(
    lib: CDLL,
    form: Form,
    scores: Tensor,
    table: Tensor,
    scales: Sequence[Tensor],
    gates: Gates,
    dscores: Tensor | None = None,
    sums: Tensor | None = None,
) -> bool:
    """One call; gates: results, or their gradients. False where logits are too far apart."""
    scores, learned = scores.to(_FLOAT).contiguous(), parameters(table, scales)
    call = _CALL.pack(
        *fields(form, _threads(scores, form), scores, learned, gates),
        0 if dscores is None else dscores.data_ptr(), 0 if sums is None else sums.data_ptr(),
    )  # fmt: skip
    failed = lib.stream_gates(call, (_MHC if form.mhc else _HYPER) + (dscores is not None))
    checked(failed == 1)
    return not failed


def results(form: Form, scores: Tensor) -> Gates:
    """Memory for the gates of these scores."""
    lead, n = scores.shape[: -1 if form.mhc else -2], form.n
    mixes = not form.mhc or scores.shape[-1] > 2 * n
    mixing = torch.empty(*lead, n, n) if mixes else None
    return torch.empty(*lead, n), torch.empty(*lead, n), mixing


def parameters(table: Tensor, scales: Sequence[Tensor]) -> list[Tensor]:
    """The table and the scales as a kernel takes them."""
    return [x.to(_FLOAT).contiguous() for x in (table, *scales)]


def fields(form: Form, share: int, scores: Tensor, learned: Sequence[Tensor], gates: Gates) -> Fields:
    """`GatesCall` of gates.h but for its last two. share: of threads; what is addressed has to be kept alive."""
    mhc, n, tanh, iterations, rows_last, write_scale = form
    lead, (table, *scales), (read, write, mixing) = scores.shape[: -1 if mhc else -2], learned, gates
    a = [(address(x, _FLOAT, x.shape) or 0) + 4 * i for x in scales for i in range(x.numel())]
    return (
        lead.numel(), n, share, tanh, mixing is not None, iterations, rows_last, write_scale,
        address(scores, _FLOAT, scores.shape), address(table, _FLOAT, table.shape), *a, *[0] * (3 - len(a)),
        address(read, _FLOAT, (*lead, n)), address(mixing, _FLOAT, (*lead, n, n)) or 0,
        address(write, _FLOAT, (*lead, n)),
    )  # fmt: skip


def _threads(scores: Tensor, form: Form) -> int:
    columns = form.n * (form.n + 2)
    return max(1, min(threads(), scores.numel() // (64 * columns)))
