"""Doubly stochastic matrices from free numbers: Sinkhorn's normalisations, or a mix of permutations.

Sinkhorn (arXiv 2512.24880) divides the columns and the rows of exp(R) by their sums in turn; only the sums
divided last are 1, the others come near. A convex mix of all n! permutation matrices has both sums exact
(arXiv 2601.05732).
"""

from itertools import permutations
from math import exp
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InputError
from . import choice
from .first_order import first_order
from .precision import compute_dtype, full_precision

Last = Literal["rows", "columns"]


def sinkhorn(logits: Tensor, iterations: int = 20, *, last: Last = "rows", eps: float = 0.0) -> Tensor:
    """H (..., n, n) from R (..., n, n): exp(R), then `iterations` times both normalisations.

    Returns at least float32. Keeps only a copy of R for backward. Without eps it runs on logarithms, one launch per
    normalisation, and is finite for finite R; with no iterations it is the last normalisation alone.

    Args:
        last: "rows" divides the columns by their sums first and the rows last, so that rows sum to 1 (the
            paper's order); "columns" the other way.
        eps: added to exp(R) after the first normalisation, and to every later sum (public code; then the last
            sums are 1 only up to eps).

    Raises:
        InputError: for matrices that are not square, iterations or eps below 0, another `last`.
    """
    if (equation := choice.equation("sinkhorn")) is not None:
        equated: Tensor = equation(logits, iterations, last=last, eps=eps)
        return equated
    check_sinkhorn(logits, iterations, last, eps)
    dtype = compute_dtype(logits)
    n, lead = logits.shape[-1], logits.shape[:-2]
    if not eps and iterations and _small(logits):
        H = _in_numbers(logits, iterations, last == "rows")
        if H is not None:
            return H
    with full_precision(logits):
        rows = logits.to(dtype).reshape(-1, n, n).permute(1, 2, 0).contiguous()  # tokens last: whole-row sums
        H = _Sinkhorn.apply(rows, iterations, last == "rows", eps)
        return H.permute(2, 0, 1).contiguous().view(*lead, n, n)


def _small(logits: Tensor) -> bool:
    """Whether these are a few 4 x 4 matrices of a decoding step: Python's numbers are then faster than launches."""
    free = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return free and logits.is_cpu and logits.shape[-1] == 4 and 0 < logits.numel() <= 64


def _in_numbers(logits: Tensor, iterations: int, rows_last: bool) -> Tensor | None:
    """The same as diag(u) exp(R) diag(v), in float64; None where numbers so far apart would leave its range."""
    found = []
    for R in (logits if rows_last else logits.mT).reshape(-1, 4, 4).tolist():
        top = max(map(max, R))
        if not top - min(map(min, R)) < 200:
            return None
        found.append(_scaled([[exp(x - top) for x in row] for row in R], iterations))
    H = torch.tensor(found, dtype=compute_dtype(logits)).view(logits.shape)
    return H if rows_last else H.mT.contiguous()


def _scaled(M: list[list[float]], iterations: int) -> list[list[float]]:
    """diag(u) M diag(v) with columns divided by their sums, then rows; written out, since this is all its cost."""
    (a, b, c, d), (e, f, g, h), (i, j, k, m), (n, o, p, q) = M
    u0 = u1 = u2 = u3 = 1.0
    v0 = v1 = v2 = v3 = 1.0
    for _ in range(iterations):
        v0 = 1 / (a * u0 + e * u1 + i * u2 + n * u3)
        v1 = 1 / (b * u0 + f * u1 + j * u2 + o * u3)
        v2 = 1 / (c * u0 + g * u1 + k * u2 + p * u3)
        v3 = 1 / (d * u0 + h * u1 + m * u2 + q * u3)
        u0 = 1 / (a * v0 + b * v1 + c * v2 + d * v3)
        u1 = 1 / (e * v0 + f * v1 + g * v2 + h * v3)
        u2 = 1 / (i * v0 + j * v1 + k * v2 + m * v3)
        u3 = 1 / (n * v0 + o * v1 + p * v2 + q * v3)
    return [[u * x * v for x, v in zip(row, (v0, v1, v2, v3))] for u, row in zip((u0, u1, u2, u3), M)]


def sinkhorn_error(H: Tensor) -> tuple[Tensor, Tensor]:
    """How far H (..., n, n) is from doubly stochastic: the largest |sum - 1| of a row, and of a column."""
    H = H.to(compute_dtype(H))
    return (H.sum(-1) - 1).abs().max(), (H.sum(-2) - 1).abs().max()


def permutation_matrices(n: int) -> Tensor:
    """All n! permutation matrices (n!, n, n), in lexicographic order; that of p has its 1s at [i, p(i)]."""
    return torch.eye(n)[torch.tensor(list(permutations(range(n))))]


def permutation_mix(logits: Tensor, matrices: Tensor) -> Tensor:
    """sum_p softmax(r)_p P_p (..., n, n) of r (..., n!) and `permutation_matrices(n)`; at least float32."""
    dtype = compute_dtype(logits)
    with full_precision(logits):
        H = logits.to(dtype).softmax(-1) @ matrices.to(dtype).flatten(1)
    return H.unflatten(-1, matrices.shape[1:])


def check_sinkhorn(logits: Tensor, iterations: int, last: str, eps: float) -> None:
    """Refuse what `sinkhorn` does not define."""
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise InputError(f"logits {tuple(logits.shape)}: give square matrices (..., n, n)")
    if type(iterations) is not int or iterations < 0:
        raise InputError(f"iterations={iterations!r}: allowed is an integer of 0 or more")
    if last not in ("rows", "columns"):
        raise InputError(f"last={last!r}: allowed is 'rows' or 'columns'")
    if not eps >= 0:
        raise InputError(f"eps={eps!r}: allowed is 0 or more")


class _Sinkhorn(torch.autograd.Function):
    """On (n, n, N): dimension 0 is the row's index, so that rows are summed over dimension 1."""

    @staticmethod
    def forward(ctx: Any, R: Tensor, iterations: int, rows_last: bool, eps: float) -> Tensor:
        ctx.dims, ctx.eps = _schedule(iterations, rows_last), eps if iterations else 0.0
        ctx.save_for_backward(R)
        M = R
        for i, dim in enumerate(ctx.dims):
            M = _normalised(M, i, dim, ctx.eps)
        return M if ctx.eps else M.exp()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (R,), dims, eps = ctx.saved_tensors, ctx.dims, ctx.eps
        seen = [R]
        with full_precision(grad):
            for i, dim in enumerate(dims):
                seen.append(_normalised(seen[i], i, dim, eps))
            g = grad if eps else grad * seen[-1].exp()
            for i, dim in reversed(list(enumerate(dims))):
                before, after = seen[i], seen[i + 1]
                if not eps:
                    g = g - after.exp() * g.sum(dim, keepdim=True)
                elif i > 0:
                    g = (g - (g * after).sum(dim, keepdim=True)) / (before.sum(dim, keepdim=True) + eps)
                else:
                    p = after - eps
                    g = p * (g - (g * p).sum(dim, keepdim=True))
        return g, None, None, None


def _schedule(iterations: int, rows_last: bool) -> list[int]:
    """The dimension that each normalisation sums over."""
    first, last = (0, 1) if rows_last else (1, 0)
    return [first, last] * iterations or [last]


def _normalised(M: Tensor, i: int, dim: int, eps: float) -> Tensor:
    """The i-th normalisation: of logarithms without eps; with it a softmax first, then of the numbers."""
    if not eps:
        return M.log_softmax(dim)
    return M.softmax(dim) + eps if i == 0 else M / (M.sum(dim, keepdim=True) + eps)
