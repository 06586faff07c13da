"""The kernel of the rotation against the reference in float64."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel

from twoaxis.ops import reference, rotate
from twoaxis.sequence.rotary import rotary_angles

pytestmark = needs_kernel("rotate")
CASES = [(2, 33, 3, 24, 24), (1, 1, 2, 33, 30), (2, 129, 1, 64, 16), (3, 5, 2, 2, 2)]  # B, T, H, D, turned


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def angles(B, T, turned, by_row, dtype=torch.float32):
    positions = torch.arange(T) + torch.arange(B)[:, None] * 3 if by_row else torch.arange(T)
    return rotary_angles(positions, turned, 100.0, dtype)


@pytest.mark.parametrize("by_row", [False, True], ids=["same rows", "by row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotation_where_heads_lie(dtype, by_row, counting):
    library = counting("rotate")
    for B, T, H, D, turned in CASES:
        cos, sin = angles(B, T, turned, by_row)
        product = torch.randn(B, T, 3 * H * D).to(dtype)  # of queries, keys and values

        def through(f, cos=cos, sin=sin, H=H, D=D):
            def call(x):
                part = x[..., H * D : 2 * H * D].unflatten(-1, (H, D))
                return f(part, cos.to(torch.promote_types(x.dtype, torch.float32)), sin).transpose(1, 2)

            return call

        found = results(through(rotate), [product])
        exact = results(through(reference.rotate), [product.double()])
        for one, other in zip(found, exact, strict=True):
            assert error(one, other) <= 1e-6 + torch.finfo(dtype).eps / 2 * (dtype == torch.bfloat16)
    assert library.calls == ["rotate"] * 2 * len(CASES)


def test_odd_layouts_second_passes_and_second_derivatives():
    x = torch.randn(2, 2, 4, 12)[..., ::2].transpose(1, 2).requires_grad_()  # (2, 4, 2, 6)
    cos, sin = angles(2, 4, 6, False)
    for cotangent in (torch.ones(1).expand(2, 4, 2, 6), torch.randn(2, 6, 2, 4).transpose(1, 3)):
        out = rotate(x, cos, sin)
        found, again = (torch.autograd.grad(out, x, cotangent, retain_graph=True)[0] for _ in range(2))
        assert found.equal(again)
        assert error(found, torch.autograd.grad(reference.rotate(x, cos, sin), x, cotangent)[0]) < 1e-6
    second = [
        torch.autograd.grad(
            torch.autograd.grad(f(x, cos, sin).pow(3).sum(), x, create_graph=True)[0].pow(2).sum(), x
        )[0]
        for f in (rotate, reference.rotate)
    ]
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_have(counting):
    library = counting("rotate")
    x, (cos, sin) = torch.randn(2, 4, 2, 6), angles(2, 4, 6, False)
    assert rotate(x.double(), cos.double(), sin.double()).dtype == torch.float64
    assert rotate(x[:0], cos, sin).shape == (0, 4, 2, 6)
    assert rotate(x[0, 0], cos[0], sin[0]).shape == (2, 6)
    rotate(x, cos.clone().requires_grad_(), sin).sum().backward()
    torch.func.grad(lambda t: rotate(t, cos, sin).sum())(x)
    with torch.no_grad():
        rotate(x, cos, sin)
    assert library.calls == []


def test_only_angles_are_kept():
    x, (cos, sin), kept = torch.randn(1, 4, 2, 6, requires_grad=True), angles(1, 4, 6, False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotate(x, cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]
