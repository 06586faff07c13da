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


@pytest.mark.parametrize(
    "depth",
    [
        "depth_window",
        "depth_window(injection='gated')",
        "dynamic_window",
        "dynamic_window(form='gates')",
        "hybrid",
    ],
)
def test_watched_modules_of_a_window_are_called_in_a_step(depth):
    cfg = twoaxis.ModelConfig(vocab_size=11, d_model=12, n_blocks=3, n_heads=2, depth=depth)
    model, tokens = twoaxis.Decoder(cfg).eval(), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        before, called = twoaxis.generate(model, tokens, 4), []
        read, norm = model.stream.window_read, model.blocks[1].connections[0].norm
        handles = [m.register_forward_hook(lambda m, *_: called.append(m)) for m in (read, norm)]
        after = twoaxis.generate(model, tokens, 4)
    assert (before == after).all()
    passes = 4  # the prompt and three tokens
    assert called.count(read) == 3 * passes
    assert called.count(norm) == passes
    for handle in handles:
        handle.remove()
