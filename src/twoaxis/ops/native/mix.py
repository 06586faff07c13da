"""`mix` by its kernel: one pass forward, one backward; kept are sources and weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, table, threads

if TYPE_CHECKING:
    from ..mix_sums import Mixed

_FLOAT = torch.float32
_SCALAR, _FEATURE, _TOKEN = range(3)


class _Call(ctypes.Structure):
    """`Call` of mix.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "N", "d", "threads", "kind")),
        *((name, ctypes.c_void_p) for name in ("sources", "weights", "out", "dout", "dsources", "dweights")),
    ]


class _Pull(ctypes.Structure):
    """`Pull` of mix.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("S", "N", "d", "threads")),
        *((name, ctypes.c_void_p) for name in ("g", "weights", "x", "out", "along")),
    ]


def library(weights: Sequence[Tensor], sources: Sequence[Tensor]) -> ctypes.CDLL | None:
    """The kernel for weights that are all (), all (d,) or all (..., 1), or None."""
    if not sources[0].numel() or len({min(w.ndim, 2) for w in weights}) > 1:
        return None
    return choice.kernel("mix", sources, weights)


def forward(lib: ctypes.CDLL, weights: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """sum_i w_i x_i, like a source."""
    run = _Run(weights, sources)
    out = torch.empty(run.shape, dtype=run.dtype)
    run.call.out = address(out, run.dtype, run.shape)
    checked(lib.mix_forward(ctypes.byref(run.call), run.half))
    return out.view(sources[0].shape)


def backward(
    lib: ctypes.CDLL,
    weights: Sequence[Tensor],
    sources: Sequence[Tensor],
    dout: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of weights, then sources; None where none is `needed`."""
    run, n = _Run(weights, sources), len(sources)
    grad = dout.to(run.dtype).reshape(run.shape).contiguous()
    shape = {
        _SCALAR: (run.call.threads,),
        _FEATURE: (run.call.threads, run.shape[1]),
        _TOKEN: (run.shape[0],),
    }
    small = shape[run.call.kind]
    dweights = [torch.zeros(small) if want else None for want in needed[:n]]
    dsources = [torch.empty(run.shape, dtype=run.dtype) if want else None for want in needed[n:]]
    tables = table(dsources, run.dtype, run.shape), table(dweights, _FLOAT, small)
    run.call.dout = address(grad, run.dtype, run.shape)
    run.call.dsources, run.call.dweights = (ctypes.addressof(x) for x in tables)
    checked(lib.mix_backward(ctypes.byref(run.call), run.half))
    summed = [d if d is None or run.call.kind == _TOKEN else d.sum(0) for d in dweights]
    pairs = zip((*summed, *dsources), (*weights, *sources), strict=True)
    return [None if d is None else d.view(x.shape).to(x.dtype) for d, x in pairs]


def mixed(lib: ctypes.CDLL, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """sum_i w_i x_i of sources (N, d), alike and contiguous, by float32 weights (n,)."""
    (N, d), n, dtype = rows[0].shape, len(rows), rows[0].dtype
    out, at = torch.empty(N, d, dtype=dtype), address(weights, _FLOAT, (n,)) or 0
    tables = table(rows, dtype, (N, d)), _every(at + 4 * i for i in range(n))
    call = _Call(n=n, N=N, d=d, threads=_threads(N), kind=_SCALAR, out=address(out, dtype, (N, d)))
    call.sources, call.weights = (ctypes.addressof(x) for x in tables)
    checked(lib.mix_forward(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return out


def gathered(lib: ctypes.CDLL, x: Tensor, left: Sequence[tuple[Mixed, int]]) -> tuple[Tensor, Tensor]:
    """As `ops.mix_sums.gathered`, for a float32 or bfloat16 source x (N, d)."""
    (N, d), S, dtype, x = x.shape, len(left), x.dtype, x.contiguous()
    out, along = torch.empty(N, d, dtype=dtype), torch.zeros(_threads(N), S)
    weights = ((address(read.weights, _FLOAT, read.weights.shape) or 0) + 4 * i for read, i in left)
    tables = table([read.g for read, _ in left], dtype, (N, d)), _every(weights)
    call = _Pull(S=S, N=N, d=d, threads=len(along), x=address(x, dtype, (N, d)))
    call.out, call.along = address(out, dtype, (N, d)), address(along, _FLOAT, along.shape)
    call.g, call.weights = (ctypes.addressof(x) for x in tables)
    checked(lib.mix_pull(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return out, along.sum(0)


def _every(addresses: Iterable[int]) -> ctypes.Array[ctypes.c_void_p]:
    found = list(addresses)
    return (ctypes.c_void_p * len(found))(*found)


def _threads(tokens: int) -> int:
    return max(1, min(threads(), tokens // 16))


class _Run:
    """The inputs as the kernel takes them, and the struct that points to them; this object keeps them alive."""

    def __init__(self, weights: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.dtype, d = sources[0].dtype, sources[0].shape[-1]
        self.half = int(self.dtype == torch.bfloat16)
        self.shape = torch.Size((sources[0].numel() // d, d))
        self.sources = [x.reshape(self.shape).contiguous() for x in sources]
        kind = min(weights[0].ndim, 2)
        small = {_SCALAR: (), _FEATURE: (d,), _TOKEN: (self.shape[0],)}[kind]
        self.weights = [w.to(_FLOAT).reshape(small).contiguous() for w in weights]
        self.tables = table(self.sources, self.dtype, self.shape), table(self.weights, _FLOAT, small)
        self.call = _Call(
            n=len(sources),
            N=self.shape[0],
            d=d,
            threads=_threads(self.shape[0]),
            kind=kind,
        )
        self.call.sources, self.call.weights = (ctypes.addressof(x) for x in self.tables)
