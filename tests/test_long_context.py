"""A model of short windows on long rows: work and memory grow in proportion to the tokens."""

import pytest
import torch

import twoaxis
from twoaxis.ops import visible_pairs
from twoaxis.ops.backends.plan import block_plan


def local_model(dtype: torch.dtype = torch.float32) -> twoaxis.Decoder:
    cfg = twoaxis.ModelConfig(
        vocab_size=11, d_model=16, n_blocks=2, n_heads=2, sequence=["short_swa(window=64)", "mlp"]
    )
    return twoaxis.Decoder(cfg).to(dtype)


def saved_bytes(model: twoaxis.Decoder, length: int) -> int:
    """Bytes that a training step keeps between forward and backward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    tokens = torch.zeros(1, length, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model.loss(tokens, tokens)
    loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


def test_what_a_step_keeps_is_linear_in_the_tokens():
    model = local_model()
    small, middle, large = (saved_bytes(model, length) for length in (1024, 4096, 16384))
    assert 3.99 < middle / small < 4.01
    assert 3.99 < large / middle < 4.01


@pytest.mark.parametrize("window", [1, 16, 64, 512])
def test_the_work_is_linear_in_the_tokens(window):
    # scores that the blocks compute, and at most so many for each that the window needs
    lengths = (8192, 16384, 65536)
    scores = [sum(block.scores for block in block_plan(length, window)) for length in lengths]
    per_token = (scores[1] - scores[0]) / (lengths[1] - lengths[0])
    assert scores[2] - scores[1] == per_token * (lengths[2] - lengths[1])
    waste = scores[2] / visible_pairs(65536, window)
    assert waste < (32 if window == 1 else 2.5)  # a block of 16 queries meets 31 keys or less for w <= 16


@pytest.mark.full
def test_a_row_of_65536_tokens():
    model, tokens = local_model(torch.float64), torch.randint(11, (1, 65536))
    at = torch.arange(65536)
    with torch.no_grad():
        whole = model(tokens, last=3)
        fresh = model(tokens[:, -200:], positions=at[-200:], last=3)
    torch.testing.assert_close(whole, fresh, rtol=0, atol=1e-10)
    model.loss(tokens, tokens).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
