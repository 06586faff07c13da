"""The kernels of static depth mixing and of the causal convolution against the references in float64."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel

from twoaxis.ops import depthwise_causal_conv, mix, reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def same(fast, plain, inputs):
    found, exact = results(fast, inputs), results(plain, [x.double() for x in inputs])
    for one, other in zip(found, exact, strict=True):
        assert error(one, other) <= 1e-5 + torch.finfo(one.dtype).eps / 2


def mixing(f, one):
    """mix of (weights, *sources), or of (n weights, n sources)."""
    return (lambda w, *xs: f(xs, w)) if one else (lambda *x: f(x[len(x) // 2 :], x[: len(x) // 2]))


@needs_kernel("mix")
@DTYPES
@pytest.mark.parametrize("n", [1, 2, 5, 7, 13])
def test_mix(n, dtype, counting):
    library = counting("mix")
    for lead, d in (((33,), 24), ((1,), 33), ((129,), 344), ((2, 5), 3), ((0, 4), 6)):
        sources = [torch.randn(*lead, d).to(dtype) for _ in range(n)]
        for w in (torch.randn(n), torch.randn(n, d)):
            same(mixing(mix, True), mixing(reference.mix, True), [w, *sources])
        for shape in ((*lead, 1), ()):
            weights = [torch.randn(shape).to(dtype) for _ in range(n)]
            same(mixing(mix, False), mixing(reference.mix, False), [*weights, *sources])
    assert library.calls == ["mix_forward", "mix_backward"] * 16


@needs_kernel("mix")
def test_mix_of_some_that_need_gradients_and_of_odd_layouts():
    sources = [
        torch.randn(4, 3, 12).transpose(0, 1),
        torch.randn(1, 1, 12).expand(3, 4, 12),
        torch.randn(3, 4, 12),
    ]
    w = torch.randn(3)
    sources[2].requires_grad_()
    for cotangent in (torch.ones(1).expand(3, 4, 12), torch.randn(3, 12, 4).mT):
        found, again, exact = (
            torch.autograd.grad(f(sources, w), sources[2], cotangent)[0] for f in (mix, mix, reference.mix)
        )
        assert found.equal(again)
        assert error(found, exact) < 1e-6
    mixed = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(mix(sources, mixed).sum(), mixed, create_graph=True)


@needs_kernel("causal_conv")
@DTYPES
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_convolution(k, dtype, counting):
    library = counting("causal_conv")
    for B, T, C, R in (
        (2, 33, 24, 0),
        (1, 1, 33, 3),
        (3, 5, 8, 9),
        (1, 129, 344, 2),
        (2, 3, 5, 1),
        (0, 4, 6, 0),
    ):
        x, w = torch.randn(B, T, C).to(dtype), torch.randn(C, k)
        past = torch.randn(B, R, C).to(dtype)
        f, plain = (
            lambda x, w, *past, g=g: g(x, w, history=past[0] if past else None)
            for g in (depthwise_causal_conv, reference.depthwise_causal_conv)
        )
        same(f, plain, [x, w, past] if R else [x, w])
    assert library.calls == ["conv_forward", "conv_backward"] * 5


@needs_kernel("causal_conv")
def test_convolutions_that_the_kernel_does_not_have(counting):
    library = counting("causal_conv")
    x, w = torch.randn(2, 5, 6), torch.randn(6, 4)
    ids = torch.zeros(2, 5, dtype=torch.long)
    for out in (
        depthwise_causal_conv(x, w, segments=ids),
        depthwise_causal_conv(x.double(), w.double()),
        depthwise_causal_conv(x.unsqueeze(-1), torch.randn(6, 2, 4)),
        depthwise_causal_conv(x[:, :0], w),
    ):
        assert out.shape[0] == 2
    assert library.calls == []
    odd = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, wanted = depthwise_causal_conv(odd, w), reference.depthwise_causal_conv(odd, w)
    cotangent = torch.ones(1).expand(2, 5, 6)
    found, exact = (torch.autograd.grad(out, odd, cotangent)[0] for out in (y, wanted))
    assert error(found, exact) < 1e-6
