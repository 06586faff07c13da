"""What several residual streams are read, mixed and written by, from scores (arXiv 2409.19606, 2512.24880).

Plainly these are a dozen operations on a few numbers of each token, and 40 for 20 rounds of Sinkhorn; the kernel does
them in one, and keeps the scores alone for backward: activations and rounds are made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .first_order import first_order
from .native import stream_gates as native
from .precision import cast, compute_dtype, full_precision
from .sinkhorn import Last, sinkhorn


def hyper_gates(
    scores: Tensor, static: Tensor, s_alpha: Tensor, s_beta: Tensor, *, tanh: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """A_m (..., n), A_r^T (..., n, n) and B (..., n) of [A_m | A_r | B] = static + s tanh(scores), in float32 or more.

    scores: (..., n, n + 2). static: (n, n + 2). s: `s_alpha`, for B `s_beta`, one number each. tanh: False is without.
    Raises InputError for shapes that do not fit.
    """
    n = check_hyper_gates(scores, static, s_alpha, s_beta)
    scores = cast(scores, compute_dtype(scores))
    form = native.Form(False, n, tanh=tanh)
    if (found := _by_kernel(form, scores, static, s_alpha, s_beta)) is not None:
        read, write, mixing = found
        assert mixing is not None
        return read, mixing, write
    weights = hyper_weights(scores, static, s_alpha, s_beta, tanh=tanh)
    return weights[..., 0], weights[..., 1:-1].mT, weights[..., -1]


def hyper_weights(
    scores: Tensor, static: Tensor, s_alpha: Tensor, s_beta: Tensor, *, tanh: bool = True
) -> Tensor:
    """[A_m | A_r | B] (..., n, n + 2) of `hyper_gates`, by torch's own operations."""
    n = check_hyper_gates(scores, static, s_alpha, s_beta)
    with full_precision(scores):
        scores = cast(scores, compute_dtype(scores))
        scale = torch.cat((s_alpha.expand(n + 1), s_beta.expand(1)))
        z = scores.tanh() if tanh else scores
        return torch.addcmul(cast(static, scores.dtype), cast(scale, scores.dtype), z)


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
    """P (..., n), Q (..., n) and H (..., n, n) of [P~ | Q~ | R~] = a scores + b, in at least float32.

    P = sigmoid(P~) + eps, Q = write_scale sigmoid(Q~), H = `sinkhorn`(R~), None without R~. scores: (..., 2n + n^2) or
    (..., 2n). scales: a of each group, (3,) or (2,). bias: b, one number a column. Raises InputError for other shapes.
    """
    check_mhc_gates(scores, scales, bias, n)
    scores = cast(scores, compute_dtype(scores))
    form = native.Form(True, n, False, iterations, last == "rows", write_scale)
    if not eps and (found := _by_kernel(form, scores, bias, scales)) is not None:
        return found
    sizes = [n, n, n * n][: len(scales)]
    with full_precision(scores):
        a = torch.cat([one.expand(size) for one, size in zip(scales.unbind(), sizes, strict=True)])
        logits = torch.addcmul(cast(bias, scores.dtype), scores, cast(a, scores.dtype))
        P, Q, *R = logits.split_with_sizes(sizes, -1)
        H = sinkhorn(R[0].unflatten(-1, (n, n)), iterations, last=last, eps=eps) if R else None
        P = P.sigmoid()
        return P + eps if eps else P, write_scale * Q.sigmoid(), H


def check_hyper_gates(scores: Tensor, static: Tensor, *scales: Tensor) -> int:
    """Refuse what `hyper_gates` does not define; returns n."""
    n = len(static) if static.ndim else 0
    fits = static.shape == (n, n + 2) and scores.shape[-2:] == static.shape and scores.ndim > 2
    if not n or not fits or any(s.numel() != 1 for s in scales):
        raise InputError(
            f"scores {tuple(scores.shape)}, static {tuple(static.shape)}: give (..., n, n + 2), (n, n + 2) and "
            "scales of one number"
        )
    return n


def check_mhc_gates(scores: Tensor, scales: Tensor, bias: Tensor, n: int) -> None:
    """Refuse what `mhc_gates` does not define."""
    columns = {2: 2 * n, 3: 2 * n + n * n}.get(scales.numel(), 0)
    shapes = scales.ndim == 1 and bias.shape == (columns,) == scores.shape[-1:]
    if n < 1 or not columns or scores.ndim < 2 or not shapes:
        raise InputError(
            f"scores {tuple(scores.shape)}, scales {tuple(scales.shape)}, bias {tuple(bias.shape)} for {n} streams: "
            "give (..., c), 2 or 3 scales and (c,) with c = 2n, or 2n + n^2 with 3 scales"
        )


def _by_kernel(form: native.Form, scores: Tensor, *learned: Tensor) -> native.Gates | None:
    """The gates in one call, or None: plainly."""
    if (lib := native.library(form, scores, *learned)) is None:
        return None
    if torch.is_grad_enabled():
        found: native.Gates | None = _Gates.apply(lib, form, scores, *learned)
        return found
    return native.forward(lib, form, scores, learned[0], learned[1:])


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lib: Any, form: native.Form, scores: Tensor, table: Tensor, *scales: Tensor
    ) -> native.Gates | None:
        ctx.lib, ctx.form = lib, form
        ctx.save_for_backward(scores, table, *scales)
        return native.forward(lib, form, scores, table, scales)

    @staticmethod
    @first_order
    def backward(ctx: Any, read: Tensor, write: Tensor, mixing: Tensor | None) -> tuple[Tensor | None, ...]:
        scores, table, *scales = ctx.saved_tensors
        dscores, sums = native.backward(ctx.lib, ctx.form, scores, table, scales, (read, write, mixing))
        found, first = [], 0
        for x in (table, *scales):
            found.append(cast(sums[first : first + x.numel()], x.dtype).view(x.shape))
            first += x.numel()
        return None, None, dscores, *found
