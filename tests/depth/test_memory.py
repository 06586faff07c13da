"""Training memory: the bytes that a step saves for backward, as the network grows deeper."""

import pytest
import torch

import twoaxis


def saved_bytes(depth: str, n_blocks: int) -> int:
    """Bytes saved for backward by one forward pass: every storage once, parameters excluded."""
    torch.manual_seed(0)
    config = twoaxis.ModelConfig(vocab_size=11, d_model=64, n_blocks=n_blocks, n_heads=2, depth=depth)
    model = twoaxis.Decoder(config)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(1, 3, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    loss.backward()
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)


@pytest.mark.parametrize(
    "depth",
    [
        "additive",
        "denseformer",
        "denseformer(dilation=4, period=5)",
        "attnres",
        "attnres(block_sublayers=3)",
        "depth_window",
        "elc_bert",
        "lime",
        "lime(kind='dynamic')",
        "delta_attnres(null_source=True, gate='vector')",
        "attnres(key_rank=8)",
    ],
)
def test_saved_bytes_grow_linearly_with_depth(depth):
    few, some, many = (saved_bytes(depth, n) for n in (12, 24, 48))
    early, late = (some - few) / 12, (many - some) / 24
    assert late == pytest.approx(early, rel=0.15)
