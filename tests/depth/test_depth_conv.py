"""The depth convolution is the depthwise causal convolution on the transposed stack; the toy is a toy."""

import copy

import pytest
import torch
from points import CTX, model, perturb

import twoaxis
from twoaxis.depth import DepthConv, build
from twoaxis.ops import depthwise_causal_conv
from twoaxis.types import Layout, Reads, Shape


def trajectory(m, tokens):
    """The states h(0) .. h(L) and the inputs x_0 .. x_{L-1} that the blocks made of them."""
    _, states = m(tokens, return_states=True)
    before = [states[f"block.{n}"] for n in range(len(m.blocks) + 1)]
    x = [b.connections[0].read(s, CTX)[1] for b, s in zip(m.blocks, before[:-1], strict=True)]
    return [state["sources"].sources[-1] for state in before], x


@pytest.mark.parametrize("kernel", [1, 2, 4, 9], ids="K={}".format)
def test_is_the_causal_convolution_over_the_transposed_stack(kernel: int) -> None:
    L = 5
    m = perturb(model(f"depth_conv(kernel={kernel})", n_blocks=L).double())
    H, x = trajectory(m, torch.randint(17, (2, 4)))
    layers_as_tokens = torch.stack(H[:-1], 2).flatten(0, 1)  # (B T, L, d)
    y = depthwise_causal_conv(layers_as_tokens, m.stream.taps.weight).unflatten(0, (2, 4))
    assert m.stream.taps.weight.shape == (24, min(kernel, L))
    torch.testing.assert_close(torch.stack(x, 2), y, rtol=0, atol=1e-13)


def test_per_block_taps_are_their_own() -> None:
    m = perturb(model("depth_conv(kernel=3, shared=False)", n_blocks=4).double())
    H, x = trajectory(m, torch.randint(17, (2, 4)))
    for layer, block in enumerate(m.blocks):
        w = block.connections[0].taps.weight
        assert w.shape == (24, min(3, layer + 1))
        states = H[max(0, layer - 2) : layer + 1]
        expected = sum(w[:, j] * h for j, h in enumerate(states))
        torch.testing.assert_close(x[layer], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", [1, 3])
def test_the_window_counts_the_current_state(kernel: int) -> None:
    # pitfalls, windows: depth window K counts the current state: the read after 4 blocks sees 5-K .. 4
    m = perturb(model(f"depth_conv(kernel={kernel})", n_blocks=5).double())
    _, states = m(torch.randint(17, (1, 2)), return_states=True)
    assert states["block.4"]["sources"].index == tuple(range(5 - kernel, 5))


@pytest.mark.parametrize("options", ["", "shared=False, kernel=2"])
def test_starts_exactly_as_the_standard_transformer(options: str) -> None:
    ours, plain = model(f"depth_conv({options})", n_blocks=3), model("additive", n_blocks=3)
    plain.load_state_dict(ours.state_dict(), strict=False)
    tokens = torch.randint(17, (2, 7))
    assert torch.equal(ours(tokens), plain(tokens))


def test_shared_taps_are_registered_once_and_copied_together() -> None:
    m = model("depth_conv", n_blocks=3)
    assert [n for n in m.state_dict() if "taps" in n] == ["stream.taps.weight"]
    assert not m.param_rules()["stream.taps.weight"].decay
    twin = copy.deepcopy(m)
    assert {id(b.connections[0].taps) for b in twin.blocks} == {id(twin.stream.taps)} != {id(m.stream.taps)}
    with pytest.raises(twoaxis.InputError, match=r"use DepthConv\.network"):
        DepthConv.for_block(DepthConv.Config(), Layout(d_model=4, blocks=(("mlp",),)), 0)


@pytest.mark.parametrize(
    ("options", "taps"), [("", 4), ("kernel=2", 2), ("shared=False, kernel=2", 1 + 4 * 2)]
)
def test_parameters_and_boundaries(options: str, taps: int) -> None:
    layout = Layout(d_model=8, blocks=(("attention", "mlp"),) * 5)
    config = twoaxis.parse_spec("depth", f"depth_conv({options})")
    stream, blocks = build(config, 8, layout.blocks)
    built = sum(p.numel() for m in (stream, *(c for b in blocks for c in b)) for p in m.parameters())
    cost = config.cost(Shape(layout=layout, batch_size=1, seq_len=3))
    assert cost.parameters == built == 8 * (11 + taps)
    assert cost.boundary_bytes == {"full": config.kernel * 3 * 8 * 4}


@pytest.mark.parametrize("bad", ["kernel=0", "kernel=-1", "kernel=2.5", "kernel=True", "shared=1"])
def test_refuses(bad: str) -> None:
    with pytest.raises(twoaxis.InputError, match="allowed is"):
        twoaxis.parse_spec("depth", f"depth_conv({bad})")


def test_silu_increment_is_an_additive_branch_and_not_ddl() -> None:
    """It satisfies none of DDL's identities: not of rank one, no contraction, no read of the state."""
    m = perturb(model("silu_increment", n_blocks=1).double())
    c, core = m.blocks[0].connections[0], m.blocks[0].cores[0]
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    d = core(Reads(c.norm(x)), CTX)
    step = c(x, core, CTX) - x
    torch.testing.assert_close(step, 0.1 * d * d.sigmoid())
    assert step.min() >= -0.028
    y = torch.randn(2, 3, 24, dtype=torch.float64)
    torch.testing.assert_close(c.write(2 * x, None, y, CTX) - 2 * x, c.write(x, None, y, CTX) - x)
