"""`stream_scores` by its kernel; each function does what its plain twin in `ops` does."""

from __future__ import annotations

import struct
from ctypes import CDLL

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, threads
from .streams import MOST

_FLOAT = torch.float32
_CALL = struct.Struct("5q f 4x 6P")  # `Call` of stream_scores.cpp


def library(streams: Tensor, matrix: Tensor) -> CDLL | None:
    """The kernel for these streams, or None."""
    if not streams.numel() or streams.shape[-2] > MOST:
        return None
    return choice.kernel("stream_scores", (streams,), (matrix,))


def forward(lib: CDLL, streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """layer_norm(X_s) W, float32."""
    out = torch.empty(*streams.shape[:-1], matrix.shape[1])
    _run(lib, streams, matrix, eps, out)
    return out


def backward(lib: CDLL, streams: Tensor, matrix: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of streams and matrix (d, c)."""
    grad, dx = grad.to(_FLOAT).contiguous(), torch.empty(streams.shape, dtype=streams.dtype)
    dmatrix = torch.zeros(_threads(streams), *matrix.shape[::-1])
    _run(lib, streams, matrix, eps, grad, dx, dmatrix)
    return dx, (dmatrix[0] if len(dmatrix) == 1 else dmatrix.sum(0)).T


def _run(
    lib: CDLL,
    streams: Tensor,
    matrix: Tensor,
    eps: float,
    scores: Tensor,
    dx: Tensor | None = None,
    dmatrix: Tensor | None = None,
) -> None:
    """scores: the result, or in backward their gradient."""
    *_, n, d = streams.shape
    dtype, c, rows = streams.dtype, matrix.shape[1], streams.numel() // (n * d)
    streams, matrix = streams.contiguous(), matrix.T.to(_FLOAT).contiguous()
    where = address(scores, _FLOAT, (*streams.shape[:-1], c))
    call = _CALL.pack(
        rows, n, d, c, _threads(streams), eps, address(streams, dtype, streams.shape), address(matrix, _FLOAT, (c, d)),
        *((where, 0, 0, 0) if dx is None or dmatrix is None else (0, where, dx.data_ptr(), dmatrix.data_ptr())),
    )  # fmt: skip
    checked(lib.stream_scores(call, int(dtype == torch.bfloat16)))


def _threads(streams: Tensor) -> int:
    *_, n, d = streams.shape
    return max(1, min(threads(), streams.numel() // (16 * n * d)))
