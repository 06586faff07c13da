"""The loss by chunks of tokens: the same number and gradients as of whole logits, and less memory."""

import pytest
import torch

import twoaxis
from twoaxis.errors import InputError
from twoaxis.model import chunked_token_loss, token_loss

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch older than 2.13"
)


def case(dtype=torch.float64, shape=(3, 41), d=12, vocab=33):
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, d, dtype=dtype), torch.randn(vocab, d, dtype=dtype)
    targets = torch.randint(0, vocab, shape)
    targets[:, ::5] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


def found_and_expected(x, weight, targets):
    results = []
    for loss in (chunked_token_loss(x, weight, targets), token_loss(x @ weight.mT, targets)):
        results.append((loss, *torch.autograd.grad(3 * loss, (x, weight))))
    return zip(*results, strict=True)


@pytest.mark.parametrize("shape", [(3, 41), (1, 1), (2, 257), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_the_loss_of_whole_logits(dtype, shape):
    for found, expected in found_and_expected(*case(dtype, shape)):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_no_target_gives_zero():
    x, weight, targets = case()
    loss = chunked_token_loss(x, weight, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))


def test_under_autocast_rounds_as_its_product_does():
    """Operands of bfloat16, sums of float32: equal to the float64 loss of the rounded numbers."""
    x, weight, targets = case(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = chunked_token_loss(x, weight, targets)
    expected = token_loss(x.bfloat16().double() @ weight.bfloat16().double().mT, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)
    of_found = torch.autograd.grad(found, (x, weight))
    of_expected = torch.autograd.grad(expected, (x, weight))
    for ours, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_loses_the_same(tied):
    torch.manual_seed(0)
    cfg = twoaxis.ModelConfig(vocab_size=50, d_model=24, n_blocks=2, n_heads=2, tie_embeddings=tied)
    model = twoaxis.Decoder(cfg).double()
    tokens = torch.randint(0, 50, (2, 9))
    losses = [model.loss(tokens[:, :-1], tokens[:, 1:], chunked=chunked) for chunked in (False, True)]
    first, second = (torch.autograd.grad(loss, list(model.parameters())) for loss in losses)
    torch.testing.assert_close(losses[1], losses[0])
    for ours, theirs in zip(second, first, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_keeps_no_logits():
    """What backward keeps: one gradient of x and one of W, whatever B T V is."""
    x, weight, targets = case(torch.float32, (4, 64), d=8, vocab=999)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked_token_loss(x, weight, targets)
    assert sum(kept) < 2 * (x.numel() + weight.numel()) < targets.numel() * 999


def test_an_older_torch_is_named(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy")
    with pytest.raises(InputError, match=r"chunked loss: needs torch 2\.13 or newer"):
        chunked_token_loss(*case())


def test_a_second_derivative_is_refused():
    """Beside other terms torch would drop this one's without a word."""
    x, weight, targets = case()
    loss = chunked_token_loss(x, weight, targets) + x.square().sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True through the chunked loss"):
        torch.autograd.grad(loss, x, create_graph=True)
