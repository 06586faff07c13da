"""The native rewrite against the reference in float64, and when it is used at all."""

import pytest
import torch
from agreement import error, results, rounded_once
from native_cases import needs_kernel

from twoaxis.ops import delta_rewrite, reference

pytestmark = needs_kernel("delta_rewrite")


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def inputs(lead, d, m, dtype=torch.float32, direction=None):
    """State, direction, value and gate; m=0 is a state without channels."""
    shapes = (
        ((*lead, d, m), (*lead, d), (*lead, m), lead)
        if m
        else ((*lead, d), (*lead, d), (*lead, 1), (*lead, 1))
    )
    state, h, value, gate = (torch.randn(shape) for shape in shapes)
    return [state.to(dtype), h.to(direction or dtype), value.to(dtype), 2 * gate.sigmoid().to(dtype)]


def call(rewrite):
    return lambda *x: rewrite(*x, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("m", [0, 1, 2, 4, 8])
def test_equals_the_reference(m, dtype, counting):
    library = counting("delta_rewrite")
    for lead, d in (((33,), 24), ((1,), 33), ((129,), 344), ((2, 5), 3), ((), 7), ((0, 4), 6), ((2, 0), 6)):
        x = inputs(lead, d, m, dtype)
        found = results(call(delta_rewrite), x)
        rounded_once(found, results(call(reference.delta_rewrite), [t.double() for t in x]))
    assert library.calls == ["delta_rewrite_forward", "delta_rewrite_backward"] * 5


@pytest.mark.parametrize("m", [0, 4])
def test_any_layout_and_repeated_backward(m):
    """Pitfall: transposed, strided, expanded views of inputs and gradients -> equal to contiguous copies."""
    x = inputs((5, 3), 12, m)
    odd = [x[0].transpose(0, 1).contiguous().transpose(0, 1), x[1][:1].expand(5, 3, 12), *x[2:]]
    leaves = [t.detach().requires_grad_() for t in odd]
    out, wanted = (call(f)(*leaves) for f in (delta_rewrite, reference.delta_rewrite))
    for cotangent in (
        torch.ones(1).expand(out.shape),
        torch.randn(*out.shape[:-1], 2 * out.shape[-1])[..., ::2],
    ):
        found, again = (torch.autograd.grad(out, leaves, cotangent, retain_graph=True) for _ in range(2))
        expected = torch.autograd.grad(wanted, leaves, cotangent, retain_graph=True)
        assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))
        assert all(a.equal(b) for a, b in zip(found, again, strict=True))
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(out.sum(), leaves[0], create_graph=True)


def test_a_state_in_float32_takes_a_direction_in_bfloat16(counting):
    library = counting("delta_rewrite")
    x = inputs((9,), 24, 4, direction=torch.bfloat16)
    found = results(call(delta_rewrite), x)
    rounded_once(found, results(call(reference.delta_rewrite), [t.double() for t in x]))
    delta_rewrite(*inputs((9,), 24, 4, torch.bfloat16, torch.float32), 1e-3)
    delta_rewrite(*inputs((9,), 24, 3), 1e-3)  # three channels do not divide a vector
    delta_rewrite(*inputs((9,), 24, 4, torch.float64), 1e-3)
    assert library.calls == ["delta_rewrite_forward", "delta_rewrite_backward"]
