"""The kernel of the cross-entropy against the reference in float64."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel

from twoaxis.ops import reference, token_loss

pytestmark = needs_kernel("token_loss")
SIZES = [(33, 24), (1, 33), (5, 344), (7, 3), (2, 1), (3, 8209)]


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def case(N, V, dtype=torch.float32, scale=3.0):
    targets = torch.randint(V, (N,))
    targets[::3] = -100
    targets[-1] = V - 1
    return scale * torch.randn(N, V).to(dtype), targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loss(dtype, counting):
    library = counting("token_loss")
    for N, V in SIZES:
        z, targets = case(N, V, dtype)
        found = results(lambda z, t=targets: token_loss(z, t), [z])
        exact = results(lambda z, t=targets: reference.token_loss(z, t), [z.double()])
        assert found[0].dtype == torch.float32
        for one, other in zip(found, exact, strict=True):
            assert error(one, other) <= 1e-6 + torch.finfo(one.dtype).eps / 2
    assert library.calls == ["token_loss"] * 2 * len(SIZES)


def test_far_logits():
    """Shifted by thousands, and a row with one logit far above the rest."""
    z, targets = case(6, 70)
    z[0] += 1e4
    z[1] -= 3e4
    z[2, 5], targets[2] = 500, 6
    z[4, 1] = -torch.inf
    found = results(lambda z: token_loss(z, targets), [z])
    exact = results(lambda z: reference.token_loss(z, targets), [z.double()])
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=["NaN", "infinity"])
def test_a_logit_that_is_no_number_is_not_hidden(wrong):
    """Wherever in a row it stands, as a target or not."""
    for V in (3, 70):
        for at in {0, V // 2, V - 1}:
            z, targets = torch.randn(2, V), torch.tensor([1, 1])
            z[0, at] = wrong
            loss, grad = results(lambda z, t=targets: token_loss(z, t), [z])
            assert loss.isnan()
            assert grad[0].isnan().all()
            assert grad[1].isfinite().all()


def test_no_worse_than_torch_in_bfloat16(monkeypatch):
    z, targets = case(40, 300, torch.bfloat16)
    exact = results(lambda z: reference.token_loss(z, targets), [z.double()])
    ours = results(lambda z: token_loss(z, targets), [z])
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    torchs = results(lambda z: token_loss(z, targets), [z])
    for one, two, other in zip(ours, torchs, exact, strict=True):
        assert (one.double() - other).norm() <= 1.01 * (two.double() - other).norm() + 1e-6 * other.norm()


def test_layouts_second_passes_and_second_derivatives():
    z, targets = torch.randn(4, 3, 18)[..., ::2].transpose(0, 1).requires_grad_(), torch.randint(9, (4, 3)).mT
    out = token_loss(z, targets)
    found, again = (torch.autograd.grad(out, z, torch.tensor(0.3), retain_graph=True)[0] for _ in range(2))
    assert found.equal(again)
    exact = torch.autograd.grad(reference.token_loss(z, targets), z, torch.tensor(0.3))[0]
    assert error(found, exact) < 1e-6
    second = [
        torch.autograd.grad(torch.autograd.grad(f(z, targets), z, create_graph=True)[0].pow(2).sum(), z)[0]
        for f in (token_loss, reference.token_loss)
    ]
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)


def test_targets_that_no_logit_stands_for():
    z, targets = case(5, 7)
    for wrong in (7, -1, 1 << 40):
        targets[1] = wrong
        with pytest.raises(IndexError, match="targets must be -100 or from 0 to 6"):
            token_loss(z, targets)


def test_what_the_kernel_does_not_have(counting):
    library = counting("token_loss")
    z, targets = case(4, 6)
    assert token_loss(z.double(), targets).dtype == torch.float64
    assert token_loss(z[:0], targets[:0]).item() == 0
    torch.func.grad(lambda t: token_loss(t, targets))(z)
    assert library.calls == []
    with torch.no_grad():
        assert token_loss(z, torch.full_like(targets, -100)).item() == 0
    assert library.calls == ["token_loss"]


def test_logits_and_two_numbers_of_each_row_are_kept():
    z, targets = case(5, 7)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_loss(z.requires_grad_(), targets)
    assert [t.shape for t in kept] == [(5, 7), (5,), (5, 2)]
    assert kept[0].data_ptr() == z.data_ptr()
