"""The kernel of RMSNorm, alone and after an addition, against the reference in float64."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel
from torch import Tensor

from twoaxis.ops import add_rms_norm, reference, rms_norm

pytestmark = needs_kernel("rms_norm")
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(33, 24), (1, 33), (129, 344), (2, 5, 3), (3, 1, 65), (2, 70, 1)]


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def norming(f, dtype):
    return lambda x, gain: f(x, gain, 1e-6, dtype=dtype)


def both(f, dtype):
    """The sum and its norm side by side, so that both have a gradient."""

    def call(x: Tensor, branch: Tensor, gain: Tensor) -> Tensor:
        return torch.cat([y.to(x.dtype) for y in f(x, branch, gain, 1e-6, dtype=dtype)], -1)

    return call


def same(fast, plain, inputs):
    found, exact = results(fast, inputs), results(plain, [x.double() for x in inputs])
    for one, other in zip(found, exact, strict=True):
        half = BF16 in (one.dtype, *(x.dtype for x in inputs))
        assert error(one, other) <= 1e-5 + (2.0**-8 if half else 0)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_norm(dtype, counting):
    library = counting("rms_norm")
    for shape in SHAPES:
        x, gain = torch.randn(shape).to(dtype), torch.randn(shape[-1])
        same(norming(rms_norm, None), norming(reference.rms_norm, None), [x, gain])
        same(norming(rms_norm, None), norming(reference.rms_norm, None), [x, gain.to(dtype)])
    assert library.calls == ["norm_forward", "norm_backward"] * 2 * len(SHAPES)


@pytest.mark.parametrize(
    ("x_dtype", "y_dtype", "dtype"),
    [(FP32, FP32, None), (FP32, BF16, BF16), (FP32, BF16, None), (BF16, BF16, None)],
    ids=["fp32", "bf16 branch and norm", "bf16 branch", "bf16"],
)
def test_norm_after_an_addition(x_dtype, y_dtype, dtype, counting):
    library = counting("rms_norm")
    for shape in SHAPES:
        x, y = torch.randn(shape).to(x_dtype), torch.randn(shape).to(y_dtype)
        gain = torch.randn(shape[-1])
        exact = both(reference.add_rms_norm, None)
        if x_dtype == BF16:  # the sum is rounded before it is normed, and a row of one number is its sign
            total, normed = add_rms_norm(x, y, gain)
            assert total.equal(x + y.bfloat16())
            assert normed.equal(rms_norm(total, gain))
        elif dtype is None:
            same(both(add_rms_norm, dtype), exact, [x, y, gain])
        else:
            found = add_rms_norm(x, y, gain, dtype=dtype)
            for one, other in zip(found, (x + y, rms_norm(x + y, gain).to(dtype)), strict=True):
                assert one.equal(other)
    assert "norm_forward" in library.calls


def test_gradients_of_mixed_dtypes_are_those_of_the_steps_one_by_one():
    """A float32 stream, a bfloat16 branch, a bfloat16 norm: each gradient is rounded once."""
    x, y, gain = torch.randn(7, 33), torch.randn(7, 33).bfloat16(), torch.randn(33)
    grads = torch.randn(7, 33), torch.randn(7, 33).bfloat16()

    def gradients(f, *inputs):
        leaves = [t.detach().requires_grad_() for t in inputs]
        return torch.autograd.grad(f(*leaves), leaves, [g.to(o.dtype) for g, o in zip(grads, f(*leaves))])

    found = gradients(lambda *t: add_rms_norm(*t, dtype=BF16), x, y, gain)
    exact = gradients(reference.add_rms_norm, x.double(), y.double(), gain.double())
    assert [g.dtype for g in found] == [FP32, BF16, FP32]
    assert [error(a, b) <= bound for a, b, bound in zip(found, exact, (1e-5, 2.0**-8, 1e-5))] == [True] * 3


def test_odd_layouts_and_gradients():
    x = torch.randn(4, 3, 24).transpose(0, 1)[..., ::2].requires_grad_()
    branch, gain = torch.randn(1, 1, 12).expand(3, 4, 12), torch.randn(12)
    for cotangent in (torch.ones(1).expand(3, 4, 12), torch.randn(3, 12, 4).mT):
        for f, plain in (
            (rms_norm(x, gain), reference.rms_norm(x, gain)),
            (add_rms_norm(x, branch, gain)[1], reference.add_rms_norm(x, branch, gain)[1]),
            (add_rms_norm(x, branch, gain)[0], reference.add_rms_norm(x, branch, gain)[0]),
        ):
            found, again = (torch.autograd.grad(f, x, cotangent, retain_graph=True)[0] for _ in range(2))
            assert found.equal(again)
            assert error(found, torch.autograd.grad(plain, x, cotangent)[0]) < 1e-6


def test_a_gradient_of_a_gradient():
    x, y, gain = (torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,)))

    def second(f):
        return torch.autograd.grad(torch.autograd.grad(f(), x, create_graph=True)[0].pow(2).sum(), (x, gain))

    for f, plain in (
        (lambda: rms_norm(x, gain).pow(3).sum(), lambda: reference.rms_norm(x, gain).pow(3).sum()),
        (
            lambda: sum(t.pow(3).sum() for t in add_rms_norm(x, y, gain)),
            lambda: sum(t.pow(3).sum() for t in reference.add_rms_norm(x, y, gain)),
        ),
    ):
        for found, exact in zip(second(f), second(plain), strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_have(counting):
    library = counting("rms_norm")
    x, gain = torch.randn(2, 5, 8), torch.randn(8)
    assert rms_norm(x.double(), gain).dtype == torch.float64
    assert rms_norm(x[:0], gain).shape == (0, 5, 8)
    assert rms_norm(x.bfloat16(), gain, dtype=torch.float32).dtype == torch.float32
    total, normed = add_rms_norm(x, torch.randn(8), gain)  # of another shape
    assert total.shape == normed.shape == x.shape
    torch.func.grad(lambda t: rms_norm(t, gain).sum())(x)
    torch.vmap(lambda t: rms_norm(t, gain))(x)
    assert library.calls == []
    with torch.no_grad():
        assert rms_norm(x, gain).shape == x.shape  # few numbers
        assert library.calls == []
        assert rms_norm(torch.randn(2100, 8), gain).grad_fn is None
    assert library.calls == ["norm_forward"]


def test_only_rows_and_their_scales_are_kept():
    x, gain = torch.randn(6, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, gain)
        total, _ = add_rms_norm(x, x * 1, gain)
    assert [t.shape for t in kept] == [(6, 33), (33,), (6,), (6, 33), (33,), (6,)]
    assert kept[0].data_ptr() == x.data_ptr()
    assert kept[3].data_ptr() == total.data_ptr()
