"""`stream_scores` by its kernel; each function does what its plain twin in `ops` does."""

from __future__ import annotations

import struct
from ctypes import CDLL
from typing import NamedTuple

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, threads
from .streams import MOST

_FLOAT = torch.float32
_CALL = struct.Struct("5q f 4x 10P")  # `Call` of stream_scores.cpp


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


class Beside(NamedTuple):
    """What a gradient of streams is summed with: D like them or None, and w (..., n) of a read whose is h (..., d).

    scores: as they were made."""

    given: Tensor | None
    weights: Tensor
    read: Tensor
    scores: Tensor


def backward(
    lib: CDLL, streams: Tensor, matrix: Tensor, eps: float, grad: Tensor, beside: Beside | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of streams, with D + w h if something is beside, and of matrix (d, c)."""
    grad, dx = grad.to(_FLOAT).contiguous(), torch.empty(streams.shape, dtype=streams.dtype)
    dmatrix = torch.zeros(_threads(streams), *matrix.shape[::-1])
    _run(lib, streams, matrix, eps, grad, dx, dmatrix, beside)
    return dx, (dmatrix[0] if len(dmatrix) == 1 else dmatrix.sum(0)).T


def _run(
    lib: CDLL,
    streams: Tensor,
    matrix: Tensor,
    eps: float,
    scores: Tensor,
    dx: Tensor | None = None,
    dmatrix: Tensor | None = None,
    beside: Beside | None = None,
) -> None:
    """scores: the result, or in backward their gradient."""
    *_, n, d = streams.shape
    dtype, c, rows = streams.dtype, matrix.shape[1], streams.numel() // (n * d)
    streams, matrix = streams.contiguous(), matrix.T.to(_FLOAT).contiguous()
    where = address(scores, _FLOAT, (*streams.shape[:-1], c))
    others: tuple[int | None, ...] = (0, 0, 0, 0)
    if beside is not None:
        given = None if beside.given is None else beside.given.to(dtype).contiguous()
        others = (
            address(given, dtype, streams.shape) or 0, address(beside.read, dtype, (*streams.shape[:-2], d)),
            address(beside.weights, _FLOAT, streams.shape[:-1]), address(beside.scores, _FLOAT, scores.shape),
        )  # fmt: skip
    call = _CALL.pack(
        rows, n, d, c, _threads(streams), eps, address(streams, dtype, streams.shape), address(matrix, _FLOAT, (c, d)),
        *((where, 0, 0, 0) if dx is None or dmatrix is None else (0, where, dx.data_ptr(), dmatrix.data_ptr())),
        *others,
    )  # fmt: skip
    checked(lib.stream_scores(call, int(dtype == torch.bfloat16)))


def _threads(streams: Tensor) -> int:
    *_, n, d = streams.shape
    return max(1, min(threads(), streams.numel() // (16 * n * d)))
