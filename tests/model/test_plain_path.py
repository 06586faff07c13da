"""The plain model through its kernels: the same numbers, fewer operators, and nothing made ahead that is not used."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twoaxis
from twoaxis.depth import ahead
from twoaxis.model.saving import Saving
from twoaxis.norm import RMSNorm
from twoaxis.ops import choice
from twoaxis.types import Context
from twoaxis.verify.saved import _nodes, saved_bytes

pytestmark = pytest.mark.skipif(choice.library("rms_norm") is None, reason="no kernels here")
SIZES = {"vocab_size": 11, "d_model": 24, "n_blocks": 2, "n_heads": 2}


def model(**options) -> twoaxis.Decoder:
    torch.manual_seed(0)
    made = twoaxis.Decoder(twoaxis.ModelConfig(**{**SIZES, **options}))
    with torch.no_grad():
        for norm in made.modules():
            if isinstance(norm, RMSNorm):
                norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    return made


def tokens(T: int = 9) -> Tensor:
    return torch.randint(11, (2, T), generator=torch.Generator().manual_seed(1))


def gradients(made: twoaxis.Decoder, backend: str, autocast: bool = False) -> list[Tensor]:
    """The loss and all gradients."""
    with choice.requesting(backend), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = made.loss(tokens(), tokens().roll(-1))
        found = torch.autograd.grad(loss, list(made.parameters()))
    return [loss.detach(), *found]


def off(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error of a tensor, relative to its norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True, "n_kv_heads": 1}], ids=["usual", "norms of q and k"]
)
def test_gradients_are_those_of_plain_operators(options):
    made = model(**options)
    assert off(gradients(made, "native"), gradients(made, "plain")) < 1e-5


def test_under_autocast_they_are_no_further_from_float32():
    made = model()
    exact = gradients(made, "plain")
    plain, native = (off(gradients(made, backend, autocast=True), exact) for backend in ("plain", "native"))
    assert native < max(1.1 * plain, 1e-3)


def nodes(backend: str, blocks: int) -> int:
    with choice.requesting(backend):
        return len(list(_nodes(model(n_blocks=blocks).loss(tokens(), tokens()))))


def test_a_block_has_fewer_operators():
    """Of autograd's graph, a block more: two norms with their additions, two rotations, a gate, and the products."""
    plain, native = (nodes(backend, 3) - nodes(backend, 2) for backend in ("plain", "native"))
    assert native <= plain - 20


def test_it_keeps_less():
    made, given = model(), tokens()
    plain, native = (saved_bytes(made, given, given.clone(), backend) for backend in ("plain", "native"))
    assert native < plain
    cost = twoaxis.cost(made.cfg, 2, 9, backend="native")
    assert native == cost.saved_bytes


@pytest.fixture
def made_ahead(monkeypatch):
    """How often a norm was made with the sum before it, and how often it was taken."""
    counts = {"made": 0, "alone": 0}

    both, alone = RMSNorm.after_adding, RMSNorm.forward

    def counted_both(self, x, y):
        counts["made"] += 1
        return both(self, x, y)

    def counted_alone(self, x):
        counts["alone"] += 1
        return alone(self, x)

    monkeypatch.setattr(RMSNorm, "after_adding", counted_both)
    monkeypatch.setattr(RMSNorm, "forward", counted_alone)
    return counts


def test_norms_are_made_with_the_sums_before_them(made_ahead):
    made = model()
    expected = made(tokens())
    assert made_ahead == {"made": 4, "alone": 1}  # the first norm follows no sum
    with torch.no_grad():
        for block in made.blocks:  # one by one nobody knows what follows
            block(torch.zeros(1, 3, 24), Context())
    assert made_ahead == {"made": 4, "alone": 5}
    made.saving = Saving("blocks")
    again = made(tokens())
    assert made_ahead["made"] == 4
    torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("backend", ["plain", "native"])
def test_inference_mode(backend):
    """Its tensors have no version counter."""
    made = model()
    with choice.requesting(backend):
        with torch.no_grad():
            expected = made.loss(tokens(), tokens())
        with torch.inference_mode():
            assert made.loss(tokens(), tokens()).equal(expected)


@pytest.mark.parametrize("saved", ["cores", "host", "blocks"])
def test_recomputation_and_offloading_have_the_same_gradients(saved):
    made = model()
    exact = gradients(made, "native")
    made.saving = Saving(saved)
    assert off(gradients(made, "native"), exact) < 1e-6


def test_a_norm_that_others_watch_or_replace_is_called(made_ahead):
    made, seen = model(), []
    made.blocks[1].connections[0].norm.register_forward_hook(lambda *_: seen.append(1))
    made(tokens())
    assert len(seen) == 1
    assert made_ahead["made"] == 3
    made.blocks[1].connections[1].norm = nn.Identity()
    made(tokens())
    assert made_ahead["made"] == 3 + 2
    made.stream.norm.register_full_backward_hook(lambda *_: seen.append(2))
    made(tokens()).sum().backward()
    assert seen == [1, 1, 1, 2]


def test_a_sum_that_is_changed_or_replaced_is_normed_again():
    norm, after = RMSNorm(4), RMSNorm(4)
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    with ahead.loop([norm, after]):
        total = ahead.add(norm, x, y)
        assert ahead.normed(after, total).equal(after(total))
        total = ahead.add(norm, x, y)
        other = total.clone() + 1
        assert ahead.normed(after, other).equal(after(other))
        total = ahead.add(norm, x, y)
        total += 1
        assert ahead.normed(after, total).equal(after(total))


def test_a_user_s_own_checkpoint_around_a_block():
    made = model()
    exact = gradients(made, "native")

    class Around(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args):
            return checkpoint(self.block, *args, use_reentrant=False)

    made.blocks[0] = Around(made.blocks[0])
    assert off(gradients(made, "native"), exact) < 1e-6


def test_a_model_without_numbers():
    with torch.device("meta"):
        made = twoaxis.Decoder(twoaxis.ModelConfig(**SIZES))
    assert made(torch.zeros(2, 3, dtype=torch.long, device="meta")).shape == (2, 3, 11)
