"""`token_mix` by its kernel: one pass over the sources forward, one backward, for all sums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .call import address, checked, table, threads

if TYPE_CHECKING:
    from ..token_pull import TokenMixed

_FLOAT = torch.float32
_POINTERS = ["sources", "weights", "weighted", "strides", "sums", "dsources", "dweights"]


class Call(ctypes.Structure):
    """`Call` of token_mix.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "N", "d", "O", "threads")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]


def sums(lib: ctypes.CDLL, weights: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
    """O sums (N, d) of sources (N, d), alike, by float32 weights (N, O, n)."""
    shape, dtype = rows[0].shape, rows[0].dtype
    made = [torch.empty(shape, dtype=dtype) for _ in range(weights.shape[1])]
    call, _keep = _call(weights, rows, made)
    checked(lib.token_mix(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return made


def back(
    lib: ctypes.CDLL, weights: Tensor, rows: Sequence[Tensor], grads: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the weights, and of the sources that need one, from those of the O sums, which are contiguous."""
    shape, dtype = rows[0].shape, rows[0].dtype
    call, _keep = _call(weights, rows, grads)
    dweights = torch.empty(weights.shape)
    call.dweights = address(dweights, _FLOAT, weights.shape)
    drows = [torch.empty(shape, dtype=dtype) if want else None for want in needed]
    into = table(drows, dtype, shape)
    if any(needed):
        call.dsources = ctypes.addressof(into)
    checked(lib.token_mix_back(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return dweights, drows


def gathered(lib: ctypes.CDLL, x: Tensor, left: Sequence[tuple[TokenMixed, int]], many: int) -> list[Tensor]:
    """As `ops.token_pull.gathered`, of a float32 or bfloat16 source x (N, d) and of those before it: `many` in all."""
    (N, d), dtype = x.shape, x.dtype
    for mix, i in left:
        fits = mix.weights.dtype == _FLOAT and len(mix.weights) == N and many - 1 <= i < mix.weights.shape[-1]
        if not fits or any(g.shape != x.shape or g.dtype != dtype for g in mix.grads.values()):
            raise TypeError("a kernel sums up gradients of one dtype and shape by float32 weights")
        mix.at = mix.at or _addresses(mix)
    grads, weights = zip(*((g, w + 4 * i) for mix, i in left for g, w in mix.at))
    strides = [mix.weights.shape[1:].numel() for mix, _ in left for _ in mix.at]
    made, n = [torch.empty(N, d, dtype=dtype) for _ in range(many)], len(grads)
    sources, weighted = (ctypes.c_void_p * n)(*grads), (ctypes.c_void_p * n)(*weights)
    between, into = (ctypes.c_int64 * n)(*strides), table(made, dtype, (N, d))
    call = Call(n=n, N=N, d=d, O=many, threads=max(1, min(threads(), N // 16)))
    call.sources, call.weighted = ctypes.addressof(sources), ctypes.addressof(weighted)
    call.strides, call.sums = ctypes.addressof(between), ctypes.addressof(into)
    checked(lib.token_mix(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return made


def _addresses(mix: TokenMixed) -> list[tuple[int, int]]:
    """Where each gradient is, and where its weights begin in those of all, (N, O, n)."""
    weights, size = mix.weights, 4 * mix.weights.shape[-1]
    first = address(weights, _FLOAT, weights.shape) or 0
    return [(address(g, g.dtype, g.shape) or 0, first + size * o) for o, g in mix.grads.items()]


def _call(weights: Tensor, rows: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[Call, object]:
    """The call, and what has to live as long. Sources may lie in memory as they like."""
    (N, d), n, many = rows[0].shape, len(rows), len(made)
    rows = [x.contiguous() for x in rows]
    tables = table(rows, rows[0].dtype, (N, d)), table(made, rows[0].dtype, (N, d))
    call = Call(n=n, N=N, d=d, O=many, threads=max(1, min(threads(), N // 16)))
    call.weights = address(weights, _FLOAT, (N, many, n))
    call.sources, call.sums = (ctypes.addressof(x) for x in tables)
    return call, (tables, rows)
