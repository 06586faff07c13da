"""Between layers, a state that is rewritten: the delta rule, parallel streams, Sinkhorn's matrices."""

from torch import Tensor

from ..channel_read import check_channel_read
from ..checks import check_rewrite, check_streams
from ..precision import compute_dtype, full_precision
from ..sinkhorn import Last, check_sinkhorn
from ..stream_gates import check_hyper_gates, check_mhc_gates
from .model import rms


def delta_rewrite(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps: float) -> Tensor:
    """X + gate k (v^T - k^T X) with k = h / sqrt(|h|^2 + eps^2); see `ops.delta_rewrite`."""
    expanded = check_rewrite(state, direction, value, gate)
    dtype = compute_dtype(state, direction)
    lead = direction.shape[:-1]
    with full_precision(state):
        h = direction.to(dtype)
        k = (h / (h.square().sum(-1, keepdim=True) + eps**2).sqrt()).unsqueeze(-1)  # (..., d, 1)
        X = state.to(dtype) if expanded else state.to(dtype).unsqueeze(-1)  # (..., d, m)
        v = value.to(dtype).reshape(*lead, 1, X.shape[-1])
        out = X + gate.to(dtype).reshape(*lead, 1, 1) * k * (v - k.mT @ X)
    return out.reshape(state.shape).to(state.dtype)


def channel_read(state: Tensor, weights: Tensor) -> Tensor:
    """u_i = sum_v W[i, v] X[.., i, v]; see `ops.channel_read`."""
    check_channel_read(state, weights)
    dtype = compute_dtype(state)
    with full_precision(state):
        return (state.to(dtype) * weights.to(dtype)).sum(-1).to(state.dtype)


def stream_scores(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """layer_norm(X_s) W; see `ops.stream_scores`."""
    check_streams(streams, matrix=matrix)
    with full_precision(streams):
        X = streams.to(compute_dtype(streams))
        centred = X - X.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() @ matrix.to(X.dtype)


def joint_scores(streams: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """vec(X) W / rms(vec(X)); see `ops.joint_scores`."""
    check_streams(streams, joint=matrix)
    with full_precision(streams):
        x = streams.to(compute_dtype(streams)).flatten(-2)
        return rms(x, eps) @ matrix.to(x.dtype)


def stream_read(
    streams: Tensor, weights: Tensor, *, gain: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """sum_s w_s X_s and its norm; see `ops.stream_read`."""
    check_streams(streams, weights=weights, gain=gain)
    with full_precision(streams):
        X = streams.to(compute_dtype(streams))
        h = (weights.to(X.dtype).unsqueeze(-1) * X).sum(-2)
        if eps is not None:
            h = rms(h, eps) if gain is None else rms(h, eps) * gain.to(h.dtype)
    return h.to(streams.dtype)


def stream_write(streams: Tensor, mixing: Tensor | None, weights: Tensor, branch: Tensor) -> Tensor:
    """X'_t = sum_s M_ts X_s + b_t y; see `ops.stream_write`."""
    check_streams(streams, mixing=mixing, weights=weights, branch=branch)
    dtype = compute_dtype(streams, branch)
    with full_precision(streams):
        X, y = streams.to(dtype), branch.to(dtype).unsqueeze(-2)
        mixed = X if mixing is None else (mixing.to(dtype).unsqueeze(-1) * X.unsqueeze(-3)).sum(-2)
        return (mixed + weights.to(dtype).unsqueeze(-1) * y).to(streams.dtype)


def sinkhorn(logits: Tensor, iterations: int = 20, *, last: Last = "rows", eps: float = 0.0) -> Tensor:
    """H from exp(R) by dividing columns and rows by their sums in turn; see `ops.sinkhorn`."""
    check_sinkhorn(logits, iterations, last, eps)
    over = (-2, -1) if last == "rows" else (-1, -2)
    with full_precision(logits):
        R = logits.to(compute_dtype(logits))
        if not iterations:
            return R.softmax(over[1])
        if eps:
            H = R.softmax(over[0]) + eps
            H = H / (H.sum(over[1], keepdim=True) + eps)
            for _ in range(iterations - 1):
                for dim in over:
                    H = H / (H.sum(dim, keepdim=True) + eps)
            return H
        for _ in range(iterations):
            for dim in over:
                R = R - R.logsumexp(dim, keepdim=True)
        return R.exp()


def hyper_gates(
    scores: Tensor, static: Tensor, s_alpha: Tensor, s_beta: Tensor, *, tanh: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """A_m, A_r^T and B of static + s tanh(scores); see `ops.hyper_gates`."""
    n = check_hyper_gates(scores, static, s_alpha, s_beta)
    with full_precision(scores):
        z, S, s_alpha, s_beta = (x.to(compute_dtype(scores)) for x in (scores, static, s_alpha, s_beta))
        change = z.tanh() if tanh else z
        alpha, B = S[:, :-1] + s_alpha * change[..., :-1], S[:, -1] + s_beta * change[..., -1]
        return alpha[..., 0], alpha[..., 1 : n + 1].mT, B


def mhc_gates(
    scores: Tensor,
    scales: Tensor,
    bias: Tensor,
    n: int,
    *,
    iterations: int = 20,
    last: Last = "rows",
    eps: float = 0.0,
    write_scale: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """P, Q and H of a scores + b; see `ops.mhc_gates`."""
    check_mhc_gates(scores, scales, bias, n)
    with full_precision(scores):
        z, a, b = (x.to(compute_dtype(scores)) for x in (scores, scales, bias))
        P, Q = a[0] * z[..., :n] + b[:n], a[1] * z[..., n : 2 * n] + b[n : 2 * n]
        H = None
        if len(scales) == 3:
            R = a[2] * z[..., 2 * n :] + b[2 * n :]
            H = sinkhorn(R.unflatten(-1, (n, n)), iterations, last=last, eps=eps)
        return P.sigmoid() + eps, write_scale * Q.sigmoid(), H


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X' = M X + b y and what a sublayer takes of X'; see `ops.hyper_pass`."""
    X = stream_write(streams, mixing, weights, branch)
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
    """X' = M X + b y and what a sublayer of mHC takes of X'; see `ops.mhc_pass`."""
    X, n = stream_write(streams, mixing, weights, branch), streams.shape[-2]
    z = joint_scores(X, matrix, eps)
    P, Q, H = mhc_gates(z, scales, bias, n, iterations=iterations, last=last, write_scale=write_scale)
    return X, stream_read(X, P, gain=gain, eps=read_eps), H, Q
