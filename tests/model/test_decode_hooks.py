"""A module that somebody watches is called, in a decoding step too: kernels leave its work to it."""

import pytest
import torch

import twoaxis
from twoaxis.depth.axis_gate import AxisGate
from twoaxis.norm import RMSNorm


@pytest.mark.parametrize(
    "depth", ["delta_attnres", "ddl", "muddformer", "dca", "lime(kind='dynamic')", "hybrid"]
)
def test_watched_modules_are_called(depth):
    cfg = twoaxis.ModelConfig(vocab_size=11, d_model=12, n_blocks=3, n_heads=2, depth=depth)
    model, tokens = twoaxis.Decoder(cfg).eval(), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before, called = model(tokens), set()
        watched = [
            m for c in model.blocks for m in c.connections.modules() if isinstance(m, RMSNorm | AxisGate)
        ]
        for module in watched:
            module.register_forward_hook(lambda m, *_: called.add(m))
        after = model(tokens)
    assert watched
    assert (before - after).abs().max() < 1e-5
    assert called == set(watched)
