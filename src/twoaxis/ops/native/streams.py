"""The operators on several streams by their kernel; each function does what its plain twin in `ops` does."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, threads

_FLOAT = torch.float32
_READ, _READ_BACK, _WRITE, _WRITE_BACK, _GATHER = range(5)
MOST = 8  # streams


class _Call(ctypes.Structure):
    """`Call` of streams.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "n", "d", "threads")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("x", "weights", "mixing", "gain", "branch", "out")),
        *((name, ctypes.c_void_p) for name in ("dout", "dx", "dbranch", "dweights", "dmixing", "dgain")),
        *((name, ctypes.c_void_p) for name in ("part", "back")),
    ]  # fmt: skip


def library(streams: Tensor, branch: Tensor | None, *others: Tensor | None) -> ctypes.CDLL | None:
    """The kernel for these streams, or None: a branch must not need a wider dtype than theirs."""
    if branch is not None and torch.promote_types(streams.dtype, branch.dtype) != streams.dtype:
        return None
    if not streams.numel() or streams.shape[-2] > MOST:
        return None
    return choice.kernel("streams", (streams,), (branch, *others))


def read(
    lib: ctypes.CDLL, streams: Tensor, weights: Tensor, gain: Tensor | None, eps: float | None
) -> Tensor:
    """norm(sum_s w_s X_s)."""
    run = _Run(streams, eps=eps, weights=weights, gain=gain)
    out = run.like("out", (*streams.shape[:-2], run.d))
    run(lib, _READ)
    return out


def read_back(
    lib: ctypes.CDLL,
    streams: Tensor,
    weights: Tensor,
    gain: Tensor | None,
    eps: float | None,
    dout: Tensor,
    alone: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of streams, weights (..., n) and gain. alone: in place of the streams' that of w X, (..., d)."""
    run = _Run(streams, eps=eps, weights=weights, gain=gain, dout=dout)
    dx = run.like("dbranch", dout.shape) if alone else run.like("dx", streams.shape)
    dweights = run.zeros("dweights", streams.shape[:-1])
    dgain = None if gain is None or eps is None else run.zeros("dgain", (run.threads, run.d))
    run(lib, _READ_BACK)
    return dx, dweights, None if dgain is None else dgain.sum(0)


def write(lib: ctypes.CDLL, streams: Tensor, mixing: Tensor, weights: Tensor, branch: Tensor) -> Tensor:
    """M X + b y."""
    run = _Run(streams, weights=weights, mixing=mixing, branch=branch)
    out = run.like("out", streams.shape)
    run(lib, _WRITE)
    return out


def write_back(
    lib: ctypes.CDLL, streams: Tensor, mixing: Tensor, weights: Tensor, branch: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of streams, mixing (..., n, n), weights (..., n) and branch."""
    run = _Run(streams, weights=weights, mixing=mixing, branch=branch, dout=dout)
    dx, dbranch = run.like("dx", streams.shape), run.like("dbranch", branch.shape)
    dmixing = run.zeros("dmixing", (*streams.shape[:-1], run.n))
    dweights = run.zeros("dweights", streams.shape[:-1])
    run(lib, _WRITE_BACK)
    return dx, dmixing, dweights, dbranch


def gather(
    lib: ctypes.CDLL,
    streams: Tensor,
    part: Tensor,
    given: Tensor | None,
    weights: Tensor,
    read: Tensor,
    back: Tensor,
) -> Tensor:
    """part + D + w h + k X, like the streams: part float32, D like them, w (..., n), h (..., d), k (..., 1) float32."""
    run = _Run(streams, weights=weights, branch=read, dout=given)
    run.point("part", part, _FLOAT)
    run.point("back", back, _FLOAT)
    dx = run.like("dx", streams.shape)
    run(lib, _GATHER)
    return dx


class _Run:
    """The inputs as the kernel takes them, and the struct that points to them; this object keeps them alive."""

    def __init__(
        self,
        streams: Tensor,
        *,
        eps: float | None = None,
        weights: Tensor | None = None,
        mixing: Tensor | None = None,
        gain: Tensor | None = None,
        branch: Tensor | None = None,
        dout: Tensor | None = None,
    ) -> None:
        *lead, self.n, self.d = streams.shape
        self.dtype, self.alive = streams.dtype, []  # type: torch.dtype, list[Tensor]
        N = streams.numel() // (self.n * self.d)
        self.threads = max(1, min(threads(), N // 16))
        self.call = _Call(N=N, n=self.n, d=self.d, threads=self.threads, eps=-1.0 if eps is None else eps)
        self.point("x", streams, self.dtype)
        self.point("weights", None if weights is None else weights.expand(*lead, self.n), _FLOAT)
        self.point("mixing", None if mixing is None else mixing.expand(*lead, self.n, self.n), _FLOAT)
        self.point("gain", gain, _FLOAT)
        self.point("branch", branch, self.dtype)
        self.point("dout", dout, self.dtype)

    def point(self, name: str, x: Tensor | None, dtype: torch.dtype) -> None:
        """Point to an input, made contiguous."""
        if x is not None:
            x = x.to(dtype).contiguous()
            self.alive.append(x)
            setattr(self.call, name, address(x, dtype, x.shape))

    def like(self, name: str, shape: Any) -> Tensor:
        """A result in the streams' dtype."""
        x = torch.empty(shape, dtype=self.dtype)
        setattr(self.call, name, address(x, self.dtype, x.shape))
        return x

    def zeros(self, name: str, shape: Any) -> Tensor:
        """A result in float32, zero at first."""
        x = torch.zeros(shape)
        setattr(self.call, name, address(x, _FLOAT, x.shape))
        return x

    def __call__(self, lib: ctypes.CDLL, work: int) -> None:
        checked(lib.streams_run(ctypes.byref(self.call), work, int(self.dtype == torch.bfloat16)))
