"""Gradients by torch's own operations, for fast operators whose backward pass a kernel cannot do.

That is one asked for `create_graph`, whose gradients are differentiable themselves, or for many gradients at once
(`is_grads_batched`, vectorised Jacobians).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def by_torch(*grads: Tensor | None) -> bool:
    """Whether a backward pass that was given these gradients is one of them: batched ones have no memory of theirs."""
    return torch.is_grad_enabled() or not all(g is None or torch._C._has_storage(g) for g in grads)


def differentiable(
    plain: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of `plain(*inputs)`, which computes the operator by torch's own operations.

    inputs: as saved, so that they are still connected. grads: one for each output, None where there is none.
    needed: of which inputs; the others' are None.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        made = plain(*inputs)
    outputs = (made,) if isinstance(made, Tensor) else made
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [x for x, want in zip(inputs, needed, strict=True) if want]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs], wanted, [g for _, g in pairs], create_graph=again, allow_unused=True
        )
    )
    return [next(found) if want else None for want in needed]
