"""The reads of DeepCrossAttention by their kernels: see `ops.gated_mix` and `ops.known_gates`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, table, threads

if TYPE_CHECKING:
    from ..known_gates import Gated

_FLOAT = torch.float32


class _Read(ctypes.Structure):
    """`Read` of gated_mix.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "O", "N", "d", "threads")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("sources", "weights", "gate", "out")),
    ]


class _Back(ctypes.Structure):
    """`Back` of gated_pull.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "S", "N", "d", "threads")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("sources", "g", "weights", "gate", "dsources", "dweights", "dgate")),
    ]  # fmt: skip


def library(name: str, weights: Tensor, gate: Tensor, sources: Sequence[Tensor]) -> ctypes.CDLL | None:
    """The kernel of reads, "gated_mix", or of their backward, "gated_pull"; or None."""
    return choice.kernel(name, sources, (weights, gate)) if sources[0].numel() and len(gate) else None


def read(
    lib: ctypes.CDLL, eps: float | None, weights: Tensor, gate: Tensor, rows: Sequence[Tensor]
) -> list[Tensor]:
    """The O reads (N, d) of sources (N, d), alike and contiguous. weights, gate: as `laid` gives them."""
    (N, d), n, many, dtype = rows[0].shape, len(rows), len(gate), rows[0].dtype
    outs = [torch.empty(N, d, dtype=dtype) for _ in range(many)]
    tables = table(rows, dtype, (N, d)), table(outs, dtype, (N, d))
    call = _Read(n=n, O=many, N=N, d=d, threads=_threads(N), eps=-1.0 if eps is None else eps)
    call.weights, call.gate = address(weights, _FLOAT, (many, n, d)), address(gate, _FLOAT, (many, d))
    call.sources, call.out = (ctypes.addressof(x) for x in tables)
    checked(lib.gated_mix(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return outs


def back(
    lib: ctypes.CDLL,
    eps: float | None,
    weights: Sequence[int],
    gate: Sequence[int],
    rows: Sequence[Tensor],
    grads: Sequence[int],
    needed: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Of n sources (N, d), alike and contiguous, and S gradients: gradients of the sources, where `needed`, of the
    weights (n, S, d) and of the gate (S, d). weights: where the n S rows (d,) are, the first source's first; gate:
    where the S rows are; both float32. grads: where the S gradients are, each like a source."""
    (N, d), n, S, dtype = rows[0].shape, len(rows), len(grads), rows[0].dtype
    dx = [torch.empty(N, d, dtype=dtype) if want else None for want in needed]
    call = _Back(n=n, S=S, N=N, d=d, threads=_threads(N), eps=-1.0 if eps is None else eps)
    sums = torch.zeros(call.threads, n, S, d), torch.zeros(call.threads, S, d)
    tables = {
        "sources": table(rows, dtype, (N, d)),
        "dsources": table(dx, dtype, (N, d)),
        "g": (ctypes.c_void_p * S)(*grads),
        "weights": (ctypes.c_void_p * (n * S))(*weights),
        "gate": (ctypes.c_void_p * S)(*gate),
    }
    for name, pointers in tables.items():
        setattr(call, name, ctypes.addressof(pointers))
    call.dweights, call.dgate = (address(x, _FLOAT, x.shape) for x in sums)
    checked(lib.gated_pull(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return dx, sums[0].sum(0), sums[1].sum(0)


def gathered(
    lib: ctypes.CDLL, eps: float | None, x: Tensor, every: Sequence[tuple[Gated, int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.known_gates.gathered`, for a float32 or bfloat16 source x (N, d)."""
    d = 4 * x.shape[1]
    weights = [read.at[0] + d * row for read, _, row in every]
    gate, grads = [read.at[1] + d * o for read, o, _ in every], [read.at[2][o] for read, o, _ in every]
    (dx,), db, dw = back(lib, eps, weights, gate, [x.contiguous()], grads, [True])
    assert dx is not None
    return dx, db[0], dw


def places(weights: Tensor, gate: Tensor, grads: Sequence[Tensor | None]) -> tuple[int, int, list[int]]:
    """Where b (O, n, d), w (O, d) and gradients, alike, are; 0 for what a kernel could not read."""
    if not gate.is_cpu or gate.dtype != _FLOAT:
        return 0, 0, [0] * len(grads)
    every = [0 if g is None else address(g, g.dtype, g.shape) or 0 for g in grads]
    return address(weights, _FLOAT, weights.shape) or 0, address(gate, _FLOAT, gate.shape) or 0, every


def laid(weights: Tensor, gate: Tensor, dtype: torch.dtype = _FLOAT) -> tuple[Tensor, Tensor]:
    """Weights (O, n) or (O, n, d) as (O, n, d), the gate (O, d): in one dtype, contiguous."""
    every = weights if weights.ndim == 3 else weights.unsqueeze(-1).expand(*weights.shape, gate.shape[1])
    return every.to(dtype).contiguous(), gate.to(dtype).contiguous()


def forward(
    lib: ctypes.CDLL, eps: float | None, weights: Tensor, gate: Tensor, sources: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The O reads, each like a source."""
    rows = [x.reshape(-1, x.shape[-1]).contiguous() for x in sources]
    return tuple(out.view(sources[0].shape) for out in read(lib, eps, *laid(weights, gate), rows))


def backward(
    lib: ctypes.CDLL,
    eps: float | None,
    weights: Tensor,
    gate: Tensor,
    sources: Sequence[Tensor],
    douts: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the weights, the gate and the sources, of these where `needed`."""
    d, dtype, n = sources[0].shape[-1], sources[0].dtype, len(sources)
    rows = [x.reshape(-1, d).contiguous() for x in sources]
    grads = [g.to(dtype).reshape(-1, d).contiguous() for g in douts]
    b, w = laid(weights, gate)
    first, second, at = places(b, w, grads)
    reads = range(len(w))
    each = [first + 4 * d * (o * n + i) for i in range(n) for o in reads]
    dx, db, dw = back(lib, eps, each, [second + 4 * d * o for o in reads], rows, at, needed)
    db = (db if weights.ndim == 3 else db.sum(-1)).transpose(0, 1).contiguous()
    every = zip((db, dw, *dx), (weights, gate, *sources), strict=True)
    return [None if g is None else g.to(x.dtype).reshape(x.shape) for g, x in every]


def _threads(tokens: int) -> int:
    return max(1, min(threads(), tokens // 16))
