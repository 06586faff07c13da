"""Reads over depth by known queries, by their kernels: see `ops.known_read`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call import address, checked, threads

if TYPE_CHECKING:
    from ..known_sums import Later, Seen
    from ..token_read import Options

_FLOAT = torch.float32


def _fields(pointers: str, numbers: str, reals: str) -> list[tuple[str, Any]]:
    kinds = ((numbers, ctypes.c_int64), (reals, ctypes.c_float), (pointers, ctypes.c_void_p))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Read(ctypes.Structure):
    """`Read` of known_read.cpp, field by field."""

    _fields_ = _fields("sources norms query gain dots lse rho out", "n N d threads", "scale output_eps")


class _Back(ctypes.Structure):
    """`Back` of known_read.cpp, field by field."""

    _fields_ = _fields("y dy gain inverse rho g mean dgain", "N d threads", "output_eps")


class _Pull(ctypes.Structure):
    """`Pull` of known_pull.cpp, field by field."""

    _fields_ = _fields("g query dots lse mean x c out", "S N d threads", "scale eps")


def _threads(tokens: int) -> int:
    return max(1, min(threads(), tokens // 16))


def read(
    lib: ctypes.CDLL, o: Options, w: Tensor, gain: Tensor | None, seen: Sequence[Seen]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output (N, d), dots (n, N), log-sum-exp (N) and rho (N or 0)."""
    (N, d), n, dtype = seen[0].rows.shape, len(seen), seen[0].rows.dtype
    normed = o.output_eps is not None
    out, dots, lse = torch.empty(N, d, dtype=dtype), torch.empty(n, N), torch.empty(N)
    rho = torch.empty(N if normed else 0)
    rows, factors = _table([x.at[0] for x in seen]), _table([x.at[1] for x in seen])
    gain = None if gain is None else gain.to(_FLOAT).contiguous()
    call = _Read(
        n=n, N=N, d=d, threads=_threads(N), scale=o.scale, output_eps=o.output_eps if normed else -1.0,
        sources=ctypes.addressof(rows), norms=ctypes.addressof(factors), query=address(w, _FLOAT, (d,)),
        gain=address(gain, _FLOAT, (d,)), dots=address(dots, _FLOAT, (n, N)), lse=address(lse, _FLOAT, (N,)),
        rho=address(rho, _FLOAT, rho.shape), out=address(out, dtype, (N, d)),
    )  # fmt: skip
    checked(lib.known_read(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return out, dots, lse, rho


def back(
    lib: ctypes.CDLL, eps: float, gain: Tensor, inverse: Tensor, y: Tensor, rho: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of y = gain rho h: g = dL/dh (N, d), <g, h> (N) and the gain's gradient (d)."""
    (N, d), dtype = y.shape, y.dtype
    g, mean = torch.empty(N, d, dtype=dtype), torch.empty(N)
    dgain = torch.zeros(_threads(N), d)
    call = _Back(
        N=N, d=d, threads=len(dgain), output_eps=eps, y=address(y, dtype, (N, d)), dy=address(dy, dtype, (N, d)),
        gain=address(gain, _FLOAT, (d,)), inverse=address(inverse, _FLOAT, (d,)), rho=address(rho, _FLOAT, (N,)),
        g=address(g, dtype, (N, d)), mean=address(mean, _FLOAT, (N,)), dgain=address(dgain, _FLOAT, dgain.shape),
    )  # fmt: skip
    checked(lib.known_back(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return g, mean, dgain.sum(0)


def gathered(lib: ctypes.CDLL, x: Tensor, left: Sequence[tuple[Later, int]]) -> tuple[Tensor, Tensor]:
    """As `ops.known_sums.gathered`, for a float32 or bfloat16 source x (N, d), of reads with the same options."""
    (N, d), S, dtype = x.shape, len(left), x.dtype
    out, c, o = torch.empty(N, d, dtype=dtype), torch.empty(S, N), left[0][0].options
    if not out.numel():
        return out, c
    at = [read.at for read, _ in left]
    tables = {
        "g": _table([a[0] for a in at]),
        "query": _table([a[1] for a in at]),
        "dots": _table([a[2] + 4 * N * i for a, (_, i) in zip(at, left)]),
        "lse": _table([a[3] for a in at]),
        "mean": _table([a[4] for a in at]),
    }
    call = _Pull(S=S, N=N, d=d, threads=_threads(N), scale=o.scale, eps=o.eps)
    for name, pointers in tables.items():
        setattr(call, name, ctypes.addressof(pointers))
    call.x, call.c, call.out = (
        address(x, dtype, (N, d)),
        address(c, _FLOAT, (S, N)),
        address(out, dtype, (N, d)),
    )
    checked(lib.known_pull(ctypes.byref(call), int(dtype == torch.bfloat16)))
    return out, c


def _table(addresses: list[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
