"""The kernels of DeepCrossAttention's read against the reference in float64."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel

from twoaxis.ops import gated_mix, reference

pytestmark = needs_kernel("gated_mix")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = [((33,), 24), ((1,), 33), ((129,), 344), ((2, 5), 3), ((19,), 260)]


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def reading(f, eps):
    return lambda b, w, *xs: torch.cat(f(xs, b, w, norm_eps=eps), -1)


def signs(b, w, sources):
    """Sources whose scores are not so near 0 that their sign is rounding's."""
    scores = torch.stack([x.double() @ w.double().T for x in sources])
    return bool((scores.abs() > 1e-7 * w.norm(dim=-1).double() * sources[0].shape[-1] ** 0.5).all())


@DTYPES
@pytest.mark.parametrize("by_feature", [True, False], ids=["by feature", "by source"])
@pytest.mark.parametrize("eps", [None, 0.01], ids=["raw score", "normed score"])
@pytest.mark.parametrize(("n", "reads"), [(1, 1), (4, 3), (7, 2), (3, 5)])
def test_reads(n, reads, eps, by_feature, dtype, counting):
    torch.manual_seed(1)
    libraries = counting("gated_mix"), counting("gated_pull")
    for lead, d in SHAPES:
        sources = [torch.randn(*lead, d).to(dtype) for _ in range(n)]
        b, w = torch.randn((reads, n, d) if by_feature else (reads, n)), torch.randn(reads, d)
        assert signs(b, w, sources)
        found = results(reading(gated_mix, eps), [b, w, *sources])
        exact = results(reading(reference.gated_mix, eps), [x.double() for x in (b, w, *sources)])
        for one, other in zip(found, exact, strict=True):
            assert error(one, other) <= 1e-5 + torch.finfo(one.dtype).eps / 2
    assert [x.calls for x in libraries] == [["gated_mix"] * len(SHAPES), ["gated_pull"] * len(SHAPES)]


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_the_slope_at_a_score_of_zero_is_one(backend, monkeypatch):
    """w = 0 is where training begins."""
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    xs, b, w = (
        [torch.randn(5, 9) for _ in range(3)],
        torch.randn(2, 3, 9),
        torch.zeros(2, 9, requires_grad=True),
    )
    reads = gated_mix(xs, b, w)
    (dw,) = torch.autograd.grad(sum(g.sum() for g in reads), w)
    expected = sum(x.T @ x.sum(-1) for x in xs).expand(2, 9)
    assert error(dw, expected) < 1e-5


def test_some_that_need_gradients_odd_layouts_and_expanded_gradients():
    sources = [
        torch.randn(4, 3, 12).transpose(0, 1),
        torch.randn(1, 1, 12).expand(3, 4, 12),
        torch.randn(3, 4, 12),
    ]
    b, w = torch.randn(3, 2, 12).transpose(0, 1), torch.randn(12, 2).T
    sources[2].requires_grad_()
    for cotangent in (torch.ones(1).expand(3, 4, 24), torch.randn(3, 24, 4).mT):
        found, again, exact = (
            torch.autograd.grad(reading(f, None)(b, w, *sources), sources[2], cotangent)[0]
            for f in (gated_mix, gated_mix, reference.gated_mix)
        )
        assert found.equal(again)
        assert error(found, exact) < 1e-6


def test_one_read_of_several_without_a_gradient():
    x, w = torch.randn(7, 9, requires_grad=True), torch.randn(3, 9, requires_grad=True)
    grads = [
        torch.autograd.grad(f((x, x), torch.ones(3, 2), w)[1].sum(), (x, w))
        for f in (gated_mix, reference.gated_mix)
    ]
    assert all(error(one, other) < 1e-6 for one, other in zip(*grads, strict=True))


def test_what_is_no_number_stays_so():
    x = torch.randn(3, 9)
    x[1, 4] = float("nan")
    (read,) = gated_mix((x, torch.randn(3, 9)), torch.ones(1, 2), torch.randn(1, 9, requires_grad=True))
    assert read.isnan().any(-1).tolist() == [False, True, False]
    assert read[1].isnan().all()


def test_long_sums_keep_their_digits():
    torch.manual_seed(0)
    x, b, w = torch.rand(20000, 8) + 1, torch.ones(1, 1, 8), torch.ones(1, 8)
    found = results(reading(gated_mix, None), [b, w, x])
    exact = results(reading(reference.gated_mix, None), [y.double() for y in (b, w, x)])
    assert max(error(one, other) for one, other in zip(found, exact, strict=True)) < 2e-6
