"""The gradient of one source of reads over depth, gathered by its kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call import address, checked, table, threads

if TYPE_CHECKING:
    from ..pulled import Left

_FLOAT = torch.float32


class _Call(ctypes.Structure):
    """`Call` of depth_pull.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("S", "N", "d", "threads")),
        *((name, ctypes.c_void_p) for name in ("g", "query", "stride", "a", "c", "k", "x", "out")),
    ]


def gathered(library: ctypes.CDLL, x: Tensor, left: Sequence[tuple[Left, int]]) -> Tensor:
    """As `ops.pulled.gathered`, for one head and a float32 or bfloat16 source x (N, d)."""
    (N, d), rows = x.shape, x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    if not out.numel():
        return out
    reads = [read for read, _ in left]
    tables: dict[str, ctypes.Array[Any]] = {
        "g": table([read.g for read in reads], _FLOAT, (N, d)),
        "query": _addresses([address(read.query, _FLOAT, read.query.shape) for read in reads]),
        "stride": (ctypes.c_int64 * len(left))(*(d if len(read.query) > 1 else 0 for read in reads)),
        "a": table([read.weights[i, :, 0] for read, i in left], _FLOAT, (N,)),
        "c": table([read.steps[i, :, 0] for read, i in left], _FLOAT, (N,)),
        "k": table([read.backs[i] for read, i in left], _FLOAT, (N,)),
    }
    call = _Call(S=len(left), N=N, d=d, threads=max(1, min(threads(), N // 16)))
    for name, pointers in tables.items():
        setattr(call, name, ctypes.addressof(pointers))
    call.x, call.out = address(rows, x.dtype, (N, d)), address(out, x.dtype, (N, d))
    checked(library.depth_pull(ctypes.byref(call), int(x.dtype == torch.bfloat16)))
    return out


def _addresses(found: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(found))(*found)
