"""What the kernels of a decoding step compute at once, as plainly as in `reference`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import rms, sinkhorn, token_mix
from .sinkhorn import Last


def made_mix(
    sources: Sequence[Tensor],
    x: Tensor,
    up: Tensor,
    bias: Tensor,
    *,
    eps: float,
    finish: Literal["none", "softmax", "relu"] = "none",
    gain: Tensor | None = None,
    down: Tensor | None = None,
    gelu: Literal["erf", "tanh"] = "erf",
) -> tuple[Tensor, ...]:
    """z_o = sum_i finish_i(W_up y + b)_oi v_i, y = gain * rms(x) or gelu(W_down gain * rms(x)).

    W_up is (O n, .), b (O, n): the weights of each token's sums are made from x.
    """
    y = rms(x, eps)
    y = y if gain is None else gain * y
    if down is not None:
        y = F.gelu(y @ down.T, approximate="tanh" if gelu == "tanh" else "none")
    scores = (y @ up.T).unflatten(-1, bias.shape) + bias
    finishes = {"none": lambda s: s, "softmax": lambda s: s.softmax(-1), "relu": lambda s: s.relu()}
    return token_mix(sources, finishes[finish](scores))


def delta_read(
    state: Tensor,
    kernel: Tensor | None,
    taps: Tensor | None,
    gain: Tensor,
    gate: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor | None],
    *,
    eps: float,
    scale: float,
    raw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """c = gain * rms(u), v = scale sigmoid(W u + b), beta = 2 sigmoid(g c + g_0): (..., d), (..., m), (..., 1).

    v is made of c unless `raw`, and is W u + b itself at scale 0. u_i = sum_v W_iv X_iv, where W_iv is
    sum_j p_j w_i,v-j+(k-1)//2 of a kernel w (d, k) and taps p (m,), w itself without taps; without a kernel u = X.
    """
    u = state
    if kernel is not None:
        if taps is not None:
            m, left = len(taps), (kernel.shape[1] - 1) // 2
            padded = F.pad(kernel, (m, m))
            windows = [torch.stack([padded[:, v - j + left + m] for j in range(m)], -1) for v in range(m)]
            kernel = torch.stack([w @ taps for w in windows], -1)
        u = (state * kernel).sum(-1)
    c = gain * rms(u, eps)
    v = F.linear(u if raw else c, *target)
    return c, scale * v.sigmoid() if scale else v, 2 * F.linear(c, *gate).sigmoid()


def mhc_read(
    streams: Tensor,
    phi: Tensor,
    scales: Tensor,
    bias: Tensor,
    gain: Tensor,
    *,
    iterations: int,
    rows_last: bool,
    norm_eps: float,
    output_eps: float,
    write_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = gain * rms(P X) (B, T, d), Q (N, n, 1) and H X (N, n, d) from [P~|Q~|R~] = a (rms(vec X) phi) + b.

    P = sigmoid(P~), Q = write_scale sigmoid(Q~), H = Sinkhorn(R~), or 1 without R~. streams X (B, T, n, d).
    """
    n, d = streams.shape[-2:]
    X = streams.reshape(-1, n, d)
    sizes = [n, n, len(bias) - 2 * n][: len(scales)]
    logits = (
        rms(X.flatten(1), norm_eps) @ phi * torch.cat([a.expand(k) for a, k in zip(scales, sizes)]) + bias
    )
    P, Q, *R = logits.split(sizes, -1)
    h = gain * rms(P.sigmoid().unsqueeze(-2) @ X, output_eps)
    last: Last = "rows" if rows_last else "columns"
    mixed = sinkhorn(R[0].unflatten(-1, (n, n)), iterations, last=last) @ X if R else X
    return h.view(*streams.shape[:-2], d), write_scale * Q.sigmoid().unsqueeze(-1), mixed


def soft_window(
    h: Tensor, weight: Tensor, bias: Tensor, n: int, most: int, ramp: int, eps: float
) -> tuple[Tensor, Tensor]:
    """K = 1 + (most - 1) sigmoid(u rms(h) + c) (B, T); log clip((ramp + K - 1 - z) / ramp, 0, 1) of ages z n-1 .. 0."""
    K = 1 + (most - 1) * F.linear(rms(h, eps), weight, bias).squeeze(-1).sigmoid()
    shares = [((ramp + K - 1 - z) / ramp).clamp(0, 1) for z in range(n - 1, 0, -1)]
    return K, torch.stack([*shares, torch.ones_like(K)]).log()


class Projections(NamedTuple):
    """What the reads of a depth window share: A (heads d, d), W_K^T W_Q of each head, None where reads see one state;
    W_V (d, d); W_O (d, d) or None; b (heads, ages) or None; 1 / sqrt(D) and the norms' epsilon.
    """

    query: Tensor | None
    value: Tensor
    output: Tensor | None
    bias: Tensor | None
    heads: int
    scale: float
    eps: float


class Chooser(NamedTuple):
    """How a token chooses its window: u (rows, d), c (rows,), and what K_t adds to the share, times `part`.

    A ramp makes a soft window of at most `most`; ramp 0 a gate for each step back.
    """

    weight: Tensor
    bias: Tensor
    most: int
    ramp: int
    part: float


Injection = Literal["replace", "add", "gated", "axes"]


def window_read(
    states: Sequence[Tensor],
    p: Projections,
    *,
    injection: Injection = "add",
    gate: tuple[Tensor, Tensor] | None = None,
    s: Tensor | None = None,
    chooser: Chooser | None = None,
    share: Tensor | None = None,
    gain: Tensor | None = None,
    output_eps: float = 0.0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x = z, h + z, h + sigmoid(w rms(h) + w_0) z or `axis_gate` of s and z; gain * rms(x); share + part K.

    z = W_O [W_V,h sum_j a_hj h_j], a_h = softmax_j(scale <A_h h, h_j> + b_h,age(j) + log m_age(j)).
    """
    h, n, d = states[-1], len(states), states[-1].shape[-1]
    scores = torch.zeros(*h.shape[:-1], p.heads, n, dtype=h.dtype)
    v = torch.stack(tuple(states), -2)  # (B, T, n, d)
    if p.query is not None and n > 1:
        scores = p.scale * F.linear(h, p.query).unflatten(-1, (p.heads, d)) @ v.mT
    if p.bias is not None and n > 1:
        scores = scores + p.bias[:, :n].flip(-1)
    if chooser is not None:
        K, logs = _chosen(h, chooser, n, p.eps)
        scores = scores + logs.movedim(0, -1).unsqueeze(-2)
        share = None if share is None else share + chooser.part * K
    mixed = scores.softmax(-1) @ v  # (B, T, heads, d)
    z = (mixed.unsqueeze(-2) @ p.value.unflatten(0, (p.heads, -1)).mT).flatten(-3)
    z = z if p.output is None else F.linear(z, p.output)
    if injection == "axes":
        assert s is not None
        assert gate is not None
        x = axis_gate(s, z, *gate, p.eps)
    elif injection == "replace":
        x = z
    else:
        x = h + (1 if gate is None else F.linear(rms(h, p.eps), *gate).sigmoid()) * z
    return x, None if gain is None else gain * rms(x, output_eps), share


def _chosen(h: Tensor, chooser: Chooser, n: int, eps: float) -> tuple[Tensor, Tensor]:
    """K (B, T) and log m (n, B, T), oldest state first."""
    weight, bias, most, ramp, _ = chooser
    if ramp:
        return soft_window(h, weight, bias, n, most, ramp, eps)
    logs = F.logsigmoid(F.linear(rms(h, eps), weight, bias))[..., : n - 1].cumsum(-1)
    logs = torch.cat((torch.zeros_like(h[..., :1]), logs), -1).movedim(-1, 0)
    return logs.exp().sum(0), logs.flip(0)


def axis_gate(s: Tensor, z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """G s' + (1 - G) z', G = sigmoid(w [s'; z'] + b), s' = rms(s), z' = rms(z); each gate for its share of d."""
    s, z = rms(s, eps), rms(z, eps)
    G = (
        F.linear(torch.cat((s, z), -1), weight, bias)
        .sigmoid()
        .repeat_interleave(s.shape[-1] // len(bias), -1)
    )
    return G * s + (1 - G) * z


def hyper_read(
    streams: Tensor,
    fixed: Tensor,
    dynamic: Tensor,
    scales: tuple[Tensor, Tensor],
    gain: Tensor,
    *,
    tanh: bool,
    norm_eps: float,
    output_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = gain * rms(A_m^T X) (B, T, d), B (N, n, 1) and A_r^T X (N, n, d) of streams X (B, T, n, d).

    [A_m|A_r|B] = fixed + s tanh(layer_norm(X) W), (n, n + 2) of each token; s_alpha scales A, s_beta scales B.
    """
    n, d = streams.shape[-2:]
    X = streams.reshape(-1, n, d)
    change = F.layer_norm(X, (d,), eps=norm_eps) @ dynamic
    scale = torch.stack([scales[0]] * (n + 1) + [scales[1]])
    weights = fixed + scale * (change.tanh() if tanh else change)
    h = gain * rms((weights[..., :1].mT @ X).squeeze(-2), output_eps)
    return h.view(*streams.shape[:-2], d), weights[..., -1:], weights[..., 1:-1].mT @ X
