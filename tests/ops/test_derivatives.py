"""Derivatives that kernels do not make, of the operators every model is made of: torch's own operations make them."""

import pytest
import torch
from torch.autograd import forward_ad

from twoaxis.ops import (
    add_rms_norm,
    choice,
    hyper_gates,
    mix,
    rms_norm,
    rotate,
    swiglu,
    token_loss,
    token_mix,
)

pytestmark = pytest.mark.skipif(choice.library("rms_norm") is None, reason="no kernels here")
ANGLES = torch.linspace(0, 3, 6).view(3, 1, 2)
SHAPES = {"x": (2, 3, 2, 6), "branch": (2, 3, 2, 6), "gain": (6,)}
CASES = {
    "norm": lambda x, branch, gain: rms_norm(x, gain),
    "norm after an addition": lambda x, branch, gain: add_rms_norm(x, branch, gain)[1],
    "sum and norm": lambda x, branch, gain: torch.cat(add_rms_norm(x, branch, gain)),
    "gate": lambda x, branch, gain: swiglu(x),
    "rotation": lambda x, branch, gain: rotate(x, ANGLES.cos(), ANGLES.sin()),
    "loss": lambda x, branch, gain: token_loss(x, torch.arange(12).view(2, 3, 2) % 6),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def both(request):
    """f(make) -> what make(operator, inputs) gives by kernels and by torch."""

    def run(make):
        torch.manual_seed(0)
        inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES.values()]
        found = []
        for backend in ("native", "plain"):
            with choice.requesting(backend):
                found.append(make(request.param, inputs))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    return run


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_many_gradients_at_once(both):
    def make(f, inputs):
        out = f(*inputs)
        many = torch.stack([torch.ones_like(out), torch.arange(out.numel(), dtype=out.dtype).view(out.shape)])
        found = torch.autograd.grad(out, inputs, many, is_grads_batched=True, allow_unused=True)
        return [x for x in found if x is not None]

    both(make)


FIRST = {  # shapes, and operators whose kernels have first-order gradients alone
    "token mix": ([(3, 2, 1), (3, 5)], lambda w, x: token_mix((x,), w)[1]),
    "mix": ([(1,), (3, 5)], lambda w, x: mix((x,), w)),
    "gates": ([(3, 2, 4), (2, 4), (1,), (1,)], lambda *x: hyper_gates(*x)[0]),
}


@pytest.mark.parametrize(("shapes", "f"), FIRST.values(), ids=FIRST)
def test_many_gradients_at_once_where_there_are_none(shapes, f):
    """They are refused in words, not by an address that is missing."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = f(*inputs)
    many = torch.randn(2, *out.shape)
    with pytest.raises(RuntimeError, match=r"many gradients at once.*twoaxis\.ops\.reference"):
        torch.autograd.grad(out, inputs, many, is_grads_batched=True, allow_unused=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode(both):
    def make(f, inputs):
        with forward_ad.dual_level():
            out = f(*(forward_ad.make_dual(x, x.detach().cos()) for x in inputs))
            return forward_ad.unpack_dual(out)

    both(make)
