"""`token_mix` by its kernel: one pass over the sources forward, one backward, for all sums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .call import address, checked, table, threads

_FLOAT = torch.float32


class _Call(ctypes.Structure):
    """`Call` of token_mix.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "N", "d", "O", "threads")),
        *((name, ctypes.c_void_p) for name in ("sources", "weights", "sums", "dsources", "dweights")),
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


def _call(weights: Tensor, rows: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[_Call, object]:
    """The call, and what has to live as long. Sources may lie in memory as they like."""
    (N, d), n, many = rows[0].shape, len(rows), len(made)
    rows = [x.contiguous() for x in rows]
    tables = table(rows, rows[0].dtype, (N, d)), table(made, rows[0].dtype, (N, d))
    call = _Call(n=n, N=N, d=d, O=many, threads=max(1, min(threads(), N // 16)))
    call.weights = address(weights, _FLOAT, (N, many, n))
    call.sources, call.sums = (ctypes.addressof(x) for x in tables)
    return call, (tables, rows)
