"""One comparison for all operators: outputs and every gradient of two functions of the same inputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def results(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of sum(output * cotangent); the cotangent is the same in every dtype."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = f(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(out, leaves, cotangent.to(out.dtype))
    for x, g in zip(inputs, grads, strict=True):
        assert g.shape == x.shape
        assert g.dtype == x.dtype
    return [out.detach(), *grads]


def error(one: Tensor, other: Tensor) -> float:
    """Largest difference, relative to the larger of 1 and the largest entry of `other`."""
    assert one.shape == other.shape
    if not one.numel():
        return 0.0
    difference = (one.double() - other.double()).abs().max()
    return (difference / other.double().abs().max().clamp(min=1)).item()


def rounded_once(found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Each result is the exact one rounded to its own dtype, up to a few roundings in float32."""
    for one, other in zip(found, exact, strict=True):
        assert error(one, other) <= 1e-5 + torch.finfo(one.dtype).eps / 2


def agree(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], tolerance: float
) -> None:
    """Outputs and all gradients of the two agree."""
    found, wanted = results(fast, inputs), results(plain, inputs)
    assert found[0].dtype == wanted[0].dtype
    errors = [error(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(errors) <= tolerance, f"output and gradients off by {errors}"
