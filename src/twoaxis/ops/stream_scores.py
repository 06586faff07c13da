"""What several residual streams are read, mixed and written by: products of normed streams with a small matrix.

Only the streams and results of c numbers are kept for backward (arXiv 2409.19606, 2512.24880), and of the streams,
inside the decoder's own loop, every second state (`ops.rebuilt`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choice, rebuilt
from .checks import check_streams
from .first_order import first_order
from .native import stream_scores as native
from .precision import cast, compute_dtype, full_precision

STRIDE = 2  # of the states in a chain one in so many is kept: rewriting four streams costs more than a rank-one write


def stream_scores(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """layer_norm(X_s) W of every stream: (..., n, d) and (d, c) -> (..., n, c) in at least float32.

    The norm has no parameters. Raises InputError for shapes that do not fit.
    """
    check_streams(streams, matrix=matrix)
    if (equation := choice.compiled("stream_scores", streams, matrix)) is not None:
        equated: Tensor = equation(streams, matrix, eps)
        return equated
    scores: Tensor = _Scores.apply(place_of(streams), eps, streams, matrix)
    return scores


def joint_scores(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """vec(X) W / rms(vec(X)): (..., n, d) and (n d, c) -> (..., c) in at least float32.

    Raises InputError for shapes that do not fit.
    """
    check_streams(streams, joint=matrix)
    if (equation := choice.compiled("joint_scores", streams, matrix)) is not None:
        equated: Tensor = equation(streams, matrix, eps)
        return equated
    scores: Tensor = _JointScores.apply(place_of(streams), eps, streams, matrix)
    return scores


def place_of(streams: Tensor) -> rebuilt.Place | None:
    """Where the streams stand in the decoder's loop; None outside of it, where an operator keeps them itself."""
    loop = rebuilt.current()
    return None if loop is None else loop.place_of(streams, STRIDE)


def streams_of(ctx: Any, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What was saved, with the streams in front."""
    return kept if ctx.place is None else (rebuilt.state_of(ctx), *kept)


def _transposed_product(x: Tensor, dy: Tensor) -> Tensor:
    """x^T dy over all tokens, as (dy^T x)^T: 18 times faster where dy has a few columns."""
    return (dy.reshape(-1, dy.shape[-1]).mT @ x.reshape(-1, x.shape[-1])).mT


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Any, eps: float, streams: Tensor, matrix: Tensor) -> Tensor:
        ctx.place, ctx.eps = place, eps
        ctx.save_for_backward(*(() if place is not None else (streams,)), matrix)
        if (kernel := native.library(streams, matrix)) is not None:
            return native.forward(kernel, streams, matrix, eps)
        with full_precision(streams):
            X = cast(streams, compute_dtype(streams))
            return F.layer_norm(X, X.shape[-1:], eps=eps) @ cast(matrix, X.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        streams, matrix = streams_of(ctx, ctx.saved_tensors)
        if (kernel := native.library(streams, matrix)) is not None:
            dX, dmatrix = native.backward(kernel, streams, matrix, ctx.eps, grad)
            return None, None, dX, cast(dmatrix, matrix.dtype)
        with full_precision(streams):
            X, d = cast(streams, grad.dtype), streams.shape[-1:]
            N, mean, factor = torch.native_layer_norm(X, d, None, None, ctx.eps)
            dmatrix = _transposed_product(N, grad)
            dN = grad @ cast(matrix, X.dtype).mT
            none = [True, False, False]
            dX = torch.ops.aten.native_layer_norm_backward(dN, X, d, mean, factor, None, None, none)[0]
        return None, None, cast(dX, streams.dtype), cast(dmatrix, matrix.dtype)


class _JointScores(torch.autograd.Function):
    """y = r x W, r = 1 / sqrt(mean(x^2) + eps); y is kept, as by whoever takes it."""

    @staticmethod
    def forward(ctx: Any, place: Any, eps: float, streams: Tensor, matrix: Tensor) -> Tensor:
        ctx.place = place
        with full_precision(streams):
            y, r = joint_forward(streams, matrix, eps)
        ctx.save_for_backward(*(() if place is not None else (streams,)), matrix, y, r)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        streams, matrix, y, r = streams_of(ctx, ctx.saved_tensors)
        with full_precision(streams):
            part, back, dmatrix = joint_back(streams, matrix, y, r, grad)
            dX = torch.addcmul(part, cast(streams, y.dtype), back.unsqueeze(-1))
        return None, None, cast(dX, streams.dtype), dmatrix


def joint_forward(streams: Tensor, matrix: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y (..., c) and r (..., 1)."""
    x = cast(streams, compute_dtype(streams)).flatten(-2)
    y = x @ cast(matrix, x.dtype)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    r = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
    return y.mul_(r), r


def joint_back(
    streams: Tensor, matrix: Tensor, y: Tensor, r: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """part (..., n, d) and k (..., 1) of the streams' gradient part + k X, and the matrix's."""
    x, dp = cast(streams, y.dtype).flatten(-2), grad * r
    dmatrix = cast(_transposed_product(x, dp), matrix.dtype)
    back = (grad * y).sum(-1, keepdim=True) * r**2 / -x.shape[-1]
    return (dp @ cast(matrix, x.dtype).mT).view(streams.shape), back, dmatrix
