"""Several residual streams: read as one, mixed and written (arXiv 2409.19606, 2512.24880).

Each keeps for backward what it was given and nothing else of the streams' size: norms and reads are made again. Inside
the decoder's own loop (`ops.rebuilt`) every second state of the streams is not kept either, but rewritten. Streams X
are (..., n, d); everything runs in at least float32 and is cast once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import choice, rebuilt
from .checks import check_streams
from .first_order import first_order
from .native import streams as native
from .precision import cast, compute_dtype, full_precision
from .stream_scores import place_of, streams_of


def stream_read(
    streams: Tensor, weights: Tensor, *, gain: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """sum_s w_s X_s, (..., d) in the streams' dtype; with `eps` followed by an RMSNorm with `gain`.

    weights: (..., n). Raises InputError for shapes that do not fit.
    """
    check_streams(streams, weights=weights, gain=gain)
    if (equation := choice.compiled("stream_read", streams, weights, gain)) is not None:
        equated: Tensor = equation(streams, weights, gain=gain, eps=eps)
        return equated
    read: Tensor = _Read.apply(place_of(streams), eps, streams, weights, gain)
    return read


def stream_write(streams: Tensor, mixing: Tensor | None, weights: Tensor, branch: Tensor) -> Tensor:
    """X'_t = sum_s M_ts X_s + b_t y, like the streams; without a mixing X'_t = X_t + b_t y.

    mixing: M, (..., n, n). weights: b, (..., n). branch: y, (..., d). The first dimensions of M and b may be 1.
    Raises InputError for shapes that do not fit.
    """
    check_streams(streams, mixing=mixing, weights=weights, branch=branch)
    if (equation := choice.compiled("stream_write", streams, mixing, weights, branch)) is not None:
        equated: Tensor = equation(streams, mixing, weights, branch)
        return equated
    if mixing is not None:
        return mixed_write(written, streams, mixing, weights, branch)
    loop, place = rebuilt.current(), place_of(streams)
    out: Tensor = _Add.apply(weights, branch, streams)
    if loop is not None and place is not None:
        loop.grow(place, _added, (weights, branch), out)
    return out


def mixed_write(
    make: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    streams: Tensor,
    mixing: Tensor,
    weights: Tensor,
    branch: Tensor,
) -> Tensor:
    """`stream_write` with a mixing, of checked inputs; make: what computes it, to the bit as `written` does."""
    loop, place = rebuilt.current(), place_of(streams)
    out: Tensor = _Write.apply(place, make, streams, mixing, weights, branch)
    if loop is not None and place is not None:
        loop.grow(place, written, (mixing, weights, branch), out)
    return out


class _Read(torch.autograd.Function):
    """y = g h r, h = w X, r = 1 / sqrt(mean(h^2) + eps)."""

    @staticmethod
    def forward(
        ctx: Any, place: Any, eps: float | None, streams: Tensor, weights: Tensor, gain: Tensor | None
    ) -> Tensor:
        ctx.place, ctx.eps = place, eps
        ctx.save_for_backward(*(() if place is not None else (streams,)), weights, gain)
        if (kernel := native.library(streams, None, weights, gain)) is not None:
            return native.read(kernel, streams, weights, gain, eps)
        with full_precision(streams):
            h = _mixed(streams, weights)
            if eps is not None:
                h = F.rms_norm(h, h.shape[-1:], None if gain is None else cast(gain, h.dtype), eps)
            return cast(h, streams.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        streams, weights, gain = streams_of(ctx, ctx.saved_tensors)
        if (kernel := native.library(streams, None, weights, gain)) is not None:
            found = native.read_back(kernel, streams, weights, gain, ctx.eps, grad)
            dgain = None if found[2] is None or gain is None else cast(found[2], gain.dtype)
            return None, None, found[0], cast(_shrunk(found[1], weights), weights.dtype), dgain
        with full_precision(streams):
            X = cast(streams, compute_dtype(streams))
            dh, dgain = cast(grad, X.dtype), None
            if ctx.eps is not None:
                h = _again(X, weights)
                r = (h.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
                if gain is not None:
                    dgain = cast((dh * h * r).reshape(-1, h.shape[-1]).sum(0), gain.dtype)
                    dh = dh * cast(gain, X.dtype)
                dh = torch.addcmul(dh * r, h, (dh * h).mean(-1, keepdim=True) * r**3, value=-1)
            w = cast(weights, X.dtype).expand(X.shape[:-1]).contiguous()
            dX, dw = None, None
            if ctx.needs_input_grad[2]:
                dX = cast(w.unsqueeze(-1) @ dh.unsqueeze(-2), streams.dtype)
            if ctx.needs_input_grad[3]:
                dw = cast(_shrunk((X @ dh.unsqueeze(-1)).squeeze(-1), weights), weights.dtype)
        return None, None, dX, dw, dgain


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, place: Any, make: Any, streams: Tensor, mixing: Tensor, weights: Tensor, branch: Tensor
    ) -> Tensor:
        ctx.place = place
        ctx.save_for_backward(*(() if place is not None else (streams,)), mixing, weights, branch)
        made: Tensor = make(streams, mixing, weights, branch)
        return made

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        streams, mixing, weights, branch = streams_of(ctx, ctx.saved_tensors)
        inputs = (streams, mixing, weights, branch)
        if (kernel := native.library(streams, branch, mixing, weights)) is not None:
            dX, dM, db, dy = native.write_back(kernel, *inputs, grad)
            small = (cast(_shrunk(d, x), x.dtype) for d, x in ((dM, mixing), (db, weights)))
            return None, None, dX, *small, cast(dy, branch.dtype)
        dtype = compute_dtype(streams, branch)
        with full_precision(streams):
            G, X, y = (cast(x, dtype) for x in (grad, streams, branch))
            M = cast(mixing, dtype).expand(*X.shape[:-2], -1, -1)
            b = cast(weights, dtype).expand(X.shape[:-1]).contiguous()
            x, m, w, o = ctx.needs_input_grad[2:]
            found = (
                M.mT.contiguous() @ G if x else None,  # small matrices are fast for contiguous ones only
                _shrunk(G @ X.mT, mixing) if m else None,
                _shrunk((G @ y.unsqueeze(-1)).squeeze(-1), weights) if w else None,
                (b.unsqueeze(-2) @ G).squeeze(-2) if o else None,
            )
            return None, None, *(None if dx is None else cast(dx, x.dtype) for dx, x in zip(found, inputs))


class _Add(torch.autograd.Function):
    """Streams that are not mixed need not be kept."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, branch: Tensor, streams: Tensor) -> Tensor:
        ctx.save_for_backward(weights, branch)
        return _added(streams, weights, branch)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, branch = ctx.saved_tensors
        with full_precision(grad):
            G = cast(grad, compute_dtype(grad, branch))
            b = cast(weights, G.dtype).expand(G.shape[:-1]).contiguous()
            db = dy = None
            if ctx.needs_input_grad[0]:
                full = (G @ cast(branch, G.dtype).unsqueeze(-1)).squeeze(-1)
                db = cast(_shrunk(full, weights), weights.dtype)
            if ctx.needs_input_grad[1]:
                dy = cast((b.unsqueeze(-2) @ G).squeeze(-2), branch.dtype)
        return db, dy, grad


def _mixed(streams: Tensor, weights: Tensor) -> Tensor:
    """h = w X, (..., d), in at least float32."""
    X = cast(streams, compute_dtype(streams))
    return (cast(weights, X.dtype).expand(X.shape[:-1]).unsqueeze(-2).contiguous() @ X).squeeze(-2)


def _again(streams: Tensor, weights: Tensor) -> Tensor:
    """h in backward, without a product: what is made again is not counted as FLOPs."""
    w = cast(weights, streams.dtype).expand(streams.shape[:-1]).unsqueeze(-1)
    h = w[..., 0, :] * streams[..., 0, :]
    for s in range(1, streams.shape[-2]):
        h.addcmul_(w[..., s, :], streams[..., s, :])
    return h


def written(streams: Tensor, mixing: Tensor, weights: Tensor, branch: Tensor) -> Tensor:
    """M X + b y."""
    if (kernel := native.library(streams, branch, mixing, weights)) is not None:
        return native.write(kernel, streams, mixing, weights, branch)
    dtype = compute_dtype(streams, branch)
    with full_precision(streams):
        X, n = cast(streams, dtype), streams.shape[-2]
        M = cast(mixing, dtype).expand(*X.shape[:-1], n).contiguous()
        return _plus(M @ X, weights, branch, streams)


def _added(streams: Tensor, weights: Tensor, branch: Tensor) -> Tensor:
    """X + b y."""
    with full_precision(streams):
        return _plus(cast(streams, compute_dtype(streams, branch)), weights, branch, streams)


def _plus(mixed: Tensor, weights: Tensor, branch: Tensor, streams: Tensor) -> Tensor:
    n, d = streams.shape[-2:]
    b = cast(weights, mixed.dtype).expand(streams.shape[:-1]).reshape(-1, n, 1).contiguous()
    y = cast(branch, mixed.dtype).reshape(-1, 1, d)
    return cast(torch.baddbmm(mixed.reshape(-1, n, d), b, y).view(streams.shape), streams.dtype)


def _shrunk(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of what was repeated: summed to x's shape."""
    return grad if grad.shape == x.shape else grad.sum_to_size(x.shape)
