"""A write of streams and all that the next sublayer takes of them in one pass (arXiv 2409.19606, 2512.24880).

    X' = M X + b y;   z = scores of X',  gates of z,  h = norm(w X')

A token's streams are rewritten, scored and read while they are in the nearest caches: (2 n + 2) d numbers move forward,
where the write, the scores and the read move (4 n + 2) d, and joint scores, whose product and norm each read X', n d
more. The graph is the same without the kernel of this pass: the write is one node and what is taken another
(`stream_take`, `joint_take`), which finds its results made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_streams
from .joint_take import mhc_take
from .native import stream_pass as native
from .native.stream_gates import Form
from .native.stream_pass import Made, Taking
from .precision import few
from .sinkhorn import Last, check_sinkhorn
from .stream_gates import check_hyper_gates, check_mhc_gates, hyper_gates, mhc_gates
from .stream_scores import joint_scores, stream_scores
from .stream_take import Taken, hyper_take
from .streams import mixed_write, stream_read, stream_write, written

Passed = tuple[Tensor, Tensor, Tensor, Tensor]


def hyper_pass(
    streams: Tensor,
    mixing: Tensor | None,
    weights: Tensor,
    branch: Tensor,
    matrix: Tensor,
    static: Tensor,
    s_alpha: Tensor,
    s_beta: Tensor,
    *,
    gain: Tensor | None = None,
    tanh: bool = True,
    eps: float = 1e-6,
    read_eps: float = 1e-6,
) -> Passed:
    """`stream_write`, then `stream_scores`, `hyper_gates` and `stream_read` of the result: X', h, A_r^T and B.

    Args:
        streams: X (..., n, d). mixing: M (..., n, n), or None for X + b y. weights: b (..., n). branch: y (..., d).
        matrix: W (d, n + 2). static: (n, n + 2), of [A_m | A_r | B]. s_alpha, s_beta: tensors of one number.
        gain: (d,) of the read's norm. tanh: of the scores. eps: of the scores' norm. read_eps: of the read's.

    Returns:
        X' (..., n, d), h (..., d) in the streams' dtype; A_r^T (..., n, n), B (..., n) in at least float32, which are
        the mixing and the weights of the next write.

    Raises:
        InputError: for shapes that do not fit.
    """
    check_streams(streams, matrix=matrix, gain=gain)
    check_hyper_gates(_like(streams, matrix.shape[1]), static, s_alpha, s_beta)
    form = Form(False, streams.shape[-2], tanh=tanh)
    taking = Taking(form, matrix, static, (s_alpha, s_beta), gain, eps, read_eps)
    X, made = write_and_take(streams, mixing, weights, branch, taking)
    if (taken := hyper_take(X, taking, made)) is not None:
        assert taken.mixing is not None
        return taken.streams, taken.read, taken.mixing, taken.write
    A_m, A_r, B = hyper_gates(stream_scores(X, matrix, eps), static, s_alpha, s_beta, tanh=tanh)
    return X, stream_read(X, A_m, gain=gain, eps=read_eps), A_r, B


def mhc_pass(
    streams: Tensor,
    mixing: Tensor | None,
    weights: Tensor,
    branch: Tensor,
    matrix: Tensor,
    scales: Tensor,
    bias: Tensor,
    *,
    gain: Tensor | None = None,
    iterations: int = 20,
    last: Last = "rows",
    write_scale: float = 2.0,
    eps: float = 1e-6,
    read_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`stream_write`, then `joint_scores`, `mhc_gates` and `stream_read` of the result: X', h, H and Q.

    Args:
        streams: X (..., n, d). mixing: M (..., n, n), or None for X + b y. weights: b (..., n). branch: y (..., d).
        matrix: phi (n d, c), c = 2n + n^2, or 2n for no mixing. scales: (3,) or (2,), a of each group. bias: b (c,).
        gain: (d,) of the read's norm. iterations, last: of `sinkhorn`. write_scale: of Q. eps: of the scores' norm.
        read_eps: of the read's.

    Returns:
        X' (..., n, d), h (..., d) in the streams' dtype; H (..., n, n), or None of two scales, and Q (..., n) in at
        least float32, which are the mixing and the weights of the next write.

    Raises:
        InputError: for shapes that do not fit.
    """
    check_streams(streams, joint=matrix, gain=gain)
    n = streams.shape[-2]
    check_mhc_gates(_like(streams[..., 0, :], matrix.shape[1]), scales, bias, n)
    check_sinkhorn(_like(streams, n), iterations, last, 0.0)
    form = Form(True, n, False, iterations, last == "rows", write_scale)
    taking = Taking(form, matrix, bias, (scales,), gain, eps, read_eps)
    X, made = write_and_take(streams, mixing, weights, branch, taking)
    if (taken := mhc_take(X, taking, made)) is not None:
        return taken.streams, taken.read, taken.mixing, taken.write
    z = joint_scores(X, matrix, eps)
    P, Q, H = mhc_gates(z, scales, bias, n, iterations=iterations, last=last, write_scale=write_scale)
    return X, stream_read(X, P, gain=gain, eps=read_eps), H, Q


def write_and_take(
    streams: Tensor, mixing: Tensor | None, weights: Tensor, branch: Tensor, then: Taking
) -> tuple[Tensor, Made | None]:
    """`stream_write`, and what a sublayer will take of the result; None: nothing, of what no kernel covers."""
    check_streams(streams, mixing=mixing, weights=weights, branch=branch)
    if mixing is None or torch.compiler.is_compiling() or few((streams,)):
        return stream_write(streams, mixing, weights, branch), None
    if (lib := native.library(streams, branch, then, mixing, weights)) is None:
        return stream_write(streams, mixing, weights, branch), None
    made: list[Made] = []

    def make(streams: Tensor, mixing: Tensor, weights: Tensor, branch: Tensor) -> Tensor:
        if (found := native.run(lib, streams, mixing, weights, branch, then)) is None:
            return written(streams, mixing, weights, branch)
        made.append(found[1])
        return found[0]

    out = mixed_write(make, streams, mixing, weights, branch)
    return out, made[0] if made else None


def write_after(taken: Taken, state: Tensor, y: Tensor, then: Taking | None) -> tuple[Tensor, Made | None]:
    """`write_and_take` by what a sublayer has taken of its state; without a next one that takes, the write alone."""
    given = taken.last(state), taken.mixing, taken.write, y
    return (stream_write(*given), None) if then is None else write_and_take(*given, then)


def _like(streams: Tensor, columns: int) -> Tensor:
    """The shape (..., columns) of what is made of streams (..., d), for checks."""
    return torch.empty((), device="meta").expand(*streams.shape[:-1], columns)
