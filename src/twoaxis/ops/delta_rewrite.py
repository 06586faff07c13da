"""Deep Delta Learning's write: a gated rank-one step of a state towards a target (arXiv 2601.00417)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import choice, rebuilt
from .checks import check_rewrite
from .first_order import first_order
from .native import delta_rewrite as native
from .native import delta_step as step
from .precision import cast, compute_dtype, full_precision


def delta_rewrite(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps: float) -> Tensor:
    """X' = X + gate k (v^T - k^T X) with k = h / sqrt(|h|^2 + eps^2).

    Runs in at least float32 and returns the state's shape and dtype. Keeps only its inputs for backward, and inside
    the decoder's own loop (`ops.rebuilt`) not the state: direction, value and gate rebuild it.

    Args:
        state: X, (..., d), or (..., d, m) with m value channels.
        direction: h, (..., d), the raw sublayer output.
        value: v, the target: (...) or (..., 1); (..., m) with channels.
        gate: (...) or (..., 1), meant to lie in (0, 2), which is not checked.
        eps: in the length of h.

    Raises:
        InputError: for shapes that do not fit.
    """
    if (found := step.write(state, direction, value, gate, eps)) is not None:
        return found  # the kernel takes nothing that is refused below
    expanded = check_rewrite(state, direction, value, gate)
    if (equation := choice.compiled("delta_rewrite", state, direction, value, gate)) is not None:
        rewritten: Tensor = equation(state, direction, value, gate, eps)
        return rewritten
    lead, m = direction.shape[:-1], state.shape[-1] if expanded else 1
    inputs = (state, direction, value.reshape(*lead, m), gate.reshape(*lead, 1))
    if not torch.is_grad_enabled():
        return _rewritten(eps, *inputs)
    library = None
    if native.covers(state, direction, m):
        library = choice.kernel("delta_rewrite", (state,), inputs[1:])
    loop = rebuilt.current() if expanded else None  # one without channels is kept by the norm that reads it
    place = None if loop is None else loop.place_of(state)
    out: Tensor
    if library is not None:
        out = native.NativeRewrite.apply(library, place, eps, *inputs)
    else:
        out = _Rewrite.apply(place, eps, *inputs)
    if loop is not None and place is not None:
        run = partial(_rewritten, eps) if library is None else partial(native.rewritten, library, eps)
        loop.grow(place, run, inputs[1:], out)
    return out


def _rewritten(eps: float, state: Tensor, direction: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """X + h c^T with c = beta (v - X^T h / rho) / rho, rho = sqrt(|h|^2 + eps^2)."""
    dtype = compute_dtype(state, direction)
    with full_precision(state):
        X, h, v, beta = (cast(x, dtype) for x in (state, direction, value, gate))
        inverse = _squares(h, eps).rsqrt_()
        c = torch.addcmul(v, _read(X, h), inverse, value=-1) * (beta * inverse)
        out = torch.addcmul(X, *_outer(X, h, c))
    return cast(out, state.dtype)


class _Rewrite(torch.autograd.Function):
    """X' = X + h c^T with c = gate e / rho, e = v - r, r = X^T h / rho, rho = sqrt(|h|^2 + eps^2)."""

    @staticmethod
    def forward(
        ctx: Any,
        place: rebuilt.Place | None,
        eps: float,
        state: Tensor,
        direction: Tensor,
        value: Tensor,
        gate: Tensor,
    ) -> Tensor:
        ctx.eps, ctx.place = eps, place
        ctx.save_for_backward(*((state,) if place is None else ()), direction, value, gate)
        return _rewritten(eps, state, direction, value, gate)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if ctx.place is not None:
            tensors = (rebuilt.state_of(ctx), *tensors)
        dtype = compute_dtype(*tensors[:2])
        with full_precision(grad):
            X, h, v, beta = (x.to(dtype) for x in tensors)
            G = grad.to(dtype)
            rho = _squares(h, ctx.eps).sqrt_()
            r, p = _read(X, h) / rho, _read(G, h) / rho
            e, step = v - r, beta / rho
            dX = torch.addcmul(G, *_outer(X, h, p * -step))
            along = (p * (e - r)).sum(-1, keepdim=True) / rho  # the part of dk along h, which k's length eats
            dh = (_pull(G, e) - _pull(X, p)).addcmul_(h, along, value=-1).mul_(step)
            found = (dX, dh, p * beta, (p * e).sum(-1, keepdim=True))
            return None, None, *(d.to(x.dtype) for d, x in zip(found, tensors))


def _squares(h: Tensor, eps: float) -> Tensor:
    """|h|^2 + eps^2, (..., 1)."""
    return torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().add_(eps**2)


def _read(X: Tensor, h: Tensor) -> Tensor:
    """X^T h: (..., d, m) -> (..., m), or (..., d) -> (..., 1)."""
    return (X * h).sum(-1, keepdim=True) if X.ndim == h.ndim else (h.unsqueeze(-2) @ X).squeeze(-2)


def _pull(X: Tensor, e: Tensor) -> Tensor:
    """X e: (..., d, m) and (..., m), or (..., d) and (..., 1), -> (..., d)."""
    return X * e if X.ndim == e.ndim else (X @ e.unsqueeze(-1)).squeeze(-1)


def _outer(X: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The factors h and c^T, broadcastable against X."""
    return (h, c) if X.ndim == h.ndim else (h.unsqueeze(-1), c.unsqueeze(-2))
