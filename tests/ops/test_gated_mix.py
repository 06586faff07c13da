"""The read of DeepCrossAttention: the fast path against the plain one, in every form."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import twoaxis
from twoaxis.ops import gated_mix, reference

FORMS = [(static, eps) for static in (False, True) for eps in (None, 0.01)]
IDS = [f"{'scalar' if s else 'feature'} weights, {'normed' if e else 'raw'} score" for s, e in FORMS]


def inputs(n: int, reads: int, static: bool, shape: tuple[int, ...] = (2, 3, 5)) -> tuple[Tensor, ...]:
    """b (O, n) or (O, n, d), w (O, d), and n sources."""
    d = shape[-1]
    shapes = [(reads, n) if static else (reads, n, d), (reads, d), *[shape] * n]
    return tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)


@pytest.mark.parametrize(("static", "eps"), FORMS, ids=IDS)
@pytest.mark.parametrize(("n", "reads"), [(1, 1), (4, 3)])
def test_equals_the_reference(static, eps, n, reads):
    b, w, *sources = inputs(n, reads, static)
    fast, plain = (f(sources, b, w, norm_eps=eps) for f in (gated_mix, reference.gated_mix))
    assert len(fast) == reads
    up = [torch.randn_like(g) for g in plain]
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    grads = [torch.autograd.grad(g, [b, w, *sources], up) for g in (fast, plain)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("static", "eps"), FORMS, ids=IDS)
def test_gradients_are_those_of_finite_differences(static, eps):
    assert gradcheck(lambda b, w, *v: gated_mix(v, b, w, norm_eps=eps), inputs(3, 2, static, (2, 1, 3)))


def test_a_gate_at_zero_can_move():
    b, w, *sources = inputs(2, 1, False)
    w = torch.zeros_like(w, requires_grad=True)
    for f in (gated_mix, reference.gated_mix):
        (read,) = f(sources, b, w)
        plain = sum(b[0, i] * v for i, v in enumerate(sources))
        torch.testing.assert_close(read, plain, rtol=0, atol=1e-14)
        (grad,) = torch.autograd.grad(read.sum(), w)
        assert (grad != 0).all()


def test_half_precision_sources_are_summed_wide_and_cast_once():
    b, w, *sources = (t.detach().to(torch.bfloat16).double() for t in inputs(6, 2, False))
    exact = reference.gated_mix(sources, b, w)
    narrow = gated_mix([v.bfloat16() for v in sources], b.float(), w.float())
    for one, other in zip(narrow, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.float().bfloat16())


def test_autocast_does_not_reach_the_sums():
    b, w, *sources = (t.detach().float() for t in inputs(3, 2, False))
    plain = gated_mix(sources, b, w)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gated_mix(sources, b, w)
    assert all(torch.equal(one, other) for one, other in zip(inside, plain, strict=True))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (3,)], ids=["B=0", "T=0", "one vector"])
def test_empty_and_small(shape):
    b, w, *sources = inputs(2, 2, False, shape)
    reads = gated_mix(sources, b, w)
    assert [r.shape for r in reads] == [shape, shape]
    sum(r.sum() for r in reads).backward()
    assert all(v.grad is not None and v.grad.shape == shape for v in sources)


@pytest.mark.parametrize(
    ("weights", "gate", "message"),
    [
        ((2, 3, 5), (2, 4), "gate"),
        ((2, 4, 5), (2, 5), "2 reads of 3 sources"),
        ((1, 3), (2, 5), "2 reads of 3 sources"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(weights, gate, message):
    sources = [torch.ones(2, 5)] * 3
    with pytest.raises(twoaxis.InputError, match=message):
        gated_mix(sources, torch.ones(weights), torch.ones(gate))


@pytest.mark.parametrize("sources", [torch.ones(3, 2, 5), [], [torch.ones(2, 5), torch.ones(1, 5)]])
def test_sources_that_are_no_tuple_of_one_shape_are_refused(sources):
    with pytest.raises(twoaxis.InputError, match="sources"):
        gated_mix(sources, torch.ones(2, 3, 5), torch.ones(2, 5))


def test_second_derivatives_are_refused_aloud():
    x, w = torch.randn(2, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    reads = gated_mix((x,), torch.ones(3, 1), w)
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(sum(g.sum() for g in reads), x, create_graph=True)
