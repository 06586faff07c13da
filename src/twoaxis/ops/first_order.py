"""Hand-written gradients are first-order: asked for more, they say so instead of dropping terms."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an autograd Function's backward: refuse `create_graph=True`.

    torch's own `once_differentiable` refuses only if the incoming gradient is differentiable; where it is a
    constant, a gradient penalty would silently lose the term.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True through a fast operator, which has first-order gradients only: "
                "use its twin in twoaxis.ops.reference (local_attention: backend='reference')"
            )
        return once(ctx, *grads)

    return checked
