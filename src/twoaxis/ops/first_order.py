"""Hand-written gradients are first-order: asked for more, they say so instead of dropping terms."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

USE = "use its twin in twoaxis.ops.reference (local_attention: backend='reference')"


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an autograd Function's backward: refuse `create_graph=True`, and many gradients at once where it cannot.

    torch's own `once_differentiable` refuses only if the incoming gradient is differentiable; where it is a
    constant, a gradient penalty would silently lose the term.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return once(ctx, *grads)
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True through a fast operator, which has first-order gradients only: {USE}"
            )
        try:
            return once(ctx, *grads)
        except RuntimeError as reason:
            if all(g is None or torch._C._has_storage(g) for g in grads):
                raise
            raise RuntimeError(
                f"many gradients at once (is_grads_batched) through a fast operator: {USE}"
            ) from reason

    return checked
