"""delta_rewrite: against the plain one and against its own algebra (contraction, spectrum, limits)."""

import pytest
import torch
from agreement import agree, error, results, rounded_once
from torch.autograd import gradcheck

from twoaxis.errors import InputError
from twoaxis.ops import delta_rewrite, reference


def inputs(lead=(2, 5), d=6, m=None, columns=True, dtype=torch.float64):
    """state, direction, value, gate in (0, 2)."""
    state = torch.randn((*lead, d) if m is None else (*lead, d, m), dtype=dtype)
    value = torch.randn((*lead, m or 1) if m or columns else lead, dtype=dtype)
    gate = 2 * torch.rand((*lead, 1) if columns else lead, dtype=dtype)
    return [state, torch.randn(*lead, d, dtype=dtype), value, gate]


@pytest.mark.parametrize("m", [None, 1, 4], ids=["scalar", "one channel", "four channels"])
@pytest.mark.parametrize("columns", [True, False], ids=["(..., 1)", "(...)"])
@pytest.mark.parametrize("lead", [(2, 5), (), (1,), (3, 2, 2), (0, 4), (2, 0)], ids=str)
def test_equals_the_reference(lead, columns, m):
    for d in (1, 3, 33):
        for eps in (1e-5, 0.7):
            f, plain = (lambda *x, g=g, e=eps: g(*x, e) for g in (delta_rewrite, reference.delta_rewrite))
            agree(f, plain, inputs(lead, d, m, columns), 1e-12)


def test_is_the_matrix_equation():
    X, h, v, gate = inputs((), 6, 3)
    k = h / (h.square().sum() + 0.01).sqrt()
    A = torch.eye(6, dtype=torch.float64) - gate * torch.outer(k, k)
    expected = A @ X + gate * torch.outer(k, v)
    for f in (delta_rewrite, reference.delta_rewrite):
        assert error(f(X, h, v, gate, 0.1), expected) < 1e-15


def test_error_contracts_by_one_minus_gate():
    """At eps=0: v - k^T X' = (1 - gate)(v - k^T X); gate 0 keeps X, gate 1 writes v, the rest of X stays."""
    X, h, v, gate = inputs((7,), 6, 3)
    k = h / h.norm(dim=-1, keepdim=True)

    def missing(X):
        return v - (k[..., None] * X).sum(-2)

    for beta in (gate, torch.zeros_like(gate), torch.ones_like(gate)):
        after = delta_rewrite(X, h, v, beta, 0.0)
        assert error(missing(after), (1 - beta) * missing(X)) < 1e-14
        across = torch.randn_like(h)
        across -= k * (across * k).sum(-1, keepdim=True)
        assert error((across[..., None] * after).sum(-2), (across[..., None] * X).sum(-2)) < 1e-14
    assert delta_rewrite(X, h, v, torch.zeros_like(gate), 1e-5).equal(X)


def test_a_zero_direction_writes_nothing():
    X, h, v, gate = inputs()
    found = results(lambda *x: delta_rewrite(*x, 1e-5), [X, torch.zeros_like(h), v, gate])
    assert found[0].equal(X)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("m", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_low_precision(dtype, m):
    """Float32 inside, one cast."""
    given = inputs((3, 50), 24, m, dtype=dtype)
    found, exact = (
        results(lambda *x: delta_rewrite(*x, 1e-3), xs) for xs in (given, [x.double() for x in given])
    )
    rounded_once(found, exact)


def test_parts_in_other_dtypes():
    """A bfloat16 branch writes to a float32 state: the state's dtype is kept, each gradient has its own."""
    state, *rest = inputs(dtype=torch.float32)
    found = results(lambda *x: delta_rewrite(*x, 1e-5), [state, *(x.bfloat16() for x in rest)])
    assert found[0].dtype == torch.float32


def test_autocast_and_layout():
    """Pitfall: transposed, strided, expanded and sliced views -> equal to contiguous copies."""
    odd = [
        torch.randn(5, 2, 4, 12).permute(1, 0, 3, 2)[:, :, ::2],
        torch.randn(5, 2, 8).transpose(0, 1)[..., 1:7],
        torch.randn(4).expand(2, 5, 4),
        torch.rand(1, 5, 1).expand(2, 5, 1),
    ]
    plain = results(lambda *x: delta_rewrite(*x, 1e-5), [x.contiguous() for x in odd])
    with torch.autocast("cpu", torch.bfloat16):
        found = results(lambda *x: delta_rewrite(*x, 1e-5), odd)
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("m", [None, 2])
def test_gradcheck(m):
    assert gradcheck(lambda *x: delta_rewrite(*x, 0.3), [x.requires_grad_() for x in inputs((2,), 4, m)])


def test_second_derivatives_are_refused_aloud():
    given = [x.requires_grad_() for x in inputs()]
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(delta_rewrite(*given, 1e-5).sum(), given[0], create_graph=True)


@pytest.mark.parametrize(
    ("at", "shape", "message"),
    [
        (0, (2, 4, 6), r"state \(2, 4, 6\)"),
        (0, (2, 5, 6, 3, 1), "give"),
        (2, (2, 5, 4), r"value \(2, 5, 4\)"),
        (3, (2,), r"gate \(2,\)"),
    ],
    ids=["state", "too many axes", "value", "gate"],
)
def test_bad_shapes_are_refused(at, shape, message):
    given = inputs()
    given[at] = torch.zeros(shape)
    for f in (delta_rewrite, reference.delta_rewrite):
        with pytest.raises(InputError, match=message):
            f(*given, 1e-5)
