"""The kernel of the gated activation against the reference in float64."""

import pytest
import torch
from agreement import error, results, rounded_once
from native_cases import needs_kernel
from torch.nn import functional as F

from twoaxis.errors import InputError
from twoaxis.ops import reference, swiglu

pytestmark = needs_kernel("swiglu")


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_swiglu(dtype, counting):
    library = counting("swiglu")
    for lead, h in (((33,), 24), ((1,), 33), ((129,), 344), ((2, 5), 3), ((2, 70), 1)):
        x = (3 * torch.randn(*lead, 2 * h)).to(dtype)
        rounded_once(results(swiglu, [x]), results(reference.swiglu, [x.double()]))
    assert library.calls == ["swiglu"] * 10


def test_far_numbers():
    x = torch.tensor([[-1e4, 2.0], [-90, 2], [-20, 3], [0, 5], [20, 3], [90, 2], [1e4, 2], [1e30, 1e-3]])
    found, exact = results(swiglu, [x]), results(reference.swiglu, [x.double()])
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-36)  # below: 0


def test_no_worse_than_torch_in_bfloat16():
    x = (2 * torch.randn(64, 66)).bfloat16()

    def torchs(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    exact = results(reference.swiglu, [x.double()])
    for ours, theirs, other in zip(results(swiglu, [x]), results(torchs, [x]), exact, strict=True):
        assert (ours.double() - other).norm() <= (theirs.double() - other).norm()


def test_odd_layouts_second_passes_and_second_derivatives():
    x = torch.randn(4, 3, 24).transpose(0, 1)[..., ::2].requires_grad_()
    for cotangent in (torch.ones(1).expand(3, 4, 6), torch.randn(3, 6, 4).mT):
        out = swiglu(x)
        found, again = (torch.autograd.grad(out, x, cotangent, retain_graph=True)[0] for _ in range(2))
        assert found.equal(again)
        assert error(found, torch.autograd.grad(reference.swiglu(x), x, cotangent)[0]) < 1e-6
    second = [
        torch.autograd.grad(torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True)[0].pow(2).sum(), x)[
            0
        ]
        for f in (swiglu, reference.swiglu)
    ]
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_have(counting):
    library = counting("swiglu")
    x = torch.randn(2, 5, 8)
    assert swiglu(x.double()).dtype == torch.float64
    assert swiglu(x[:0]).shape == (0, 5, 4)
    torch.func.grad(lambda t: swiglu(t).sum())(x)
    with torch.no_grad():
        swiglu(x)
    assert library.calls == []
    with pytest.raises(InputError, match=r"\(3,\): give"):
        swiglu(torch.zeros(3))


def test_only_the_product_is_kept():
    x, kept = torch.randn(6, 10, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]
