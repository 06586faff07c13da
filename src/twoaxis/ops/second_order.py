"""Gradients that are differentiable themselves, for fast operators whose backward pass is asked for `create_graph`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


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
    made = plain(*inputs)
    outputs = (made,) if isinstance(made, Tensor) else made
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [x for x, want in zip(inputs, needed, strict=True) if want]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if want else None for want in needed]
