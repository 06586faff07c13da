"""The depth window: one operator on two axes, its three ways of computing, and who owns its projections."""

import copy
import math

import pytest
import torch

import twoaxis
from twoaxis.depth import DepthWindow, build
from twoaxis.depth.depth_window import WindowRead
from twoaxis.types import Context, Layout, Reads, Shape

SIZES = {"vocab_size": 19, "d_model": 12, "n_heads": 3}


def decoder(spec, n_blocks, std=0.3):
    """A float64 decoder at a random point."""
    torch.manual_seed(n_blocks)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, n_blocks=n_blocks, **SIZES)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn_like(parameter))
    return model


def trajectory(model, tokens):
    """The states before every block, the depth reads z made there, and the state after the last."""
    _, states = model(tokens, return_states=True)
    before = [states[f"block.{n}"] for n in range(len(model.blocks) + 1)]
    z = [
        block.connections[0].read_depth(state) for block, state in zip(model.blocks, before[:-1], strict=True)
    ]
    return [state["sources"].sources[-1] for state in before], z


@pytest.mark.parametrize("K", [1, 2, 3, None], ids=lambda K: f"K{K}")
@pytest.mark.parametrize("output", [False, True], ids=["bare", "W_O"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per_block"])
def test_is_short_swa_over_the_transposed_stack(K, output, shared):
    L, d = 5, 12
    model = decoder(f"depth_window(window_blocks={K}, output={output}, shared={shared})", L)
    H, z = trajectory(model, torch.randint(19, (2, 4)))
    tokens_are_layers = torch.stack(H[:-1], dim=2).flatten(0, 1)  # (B T, L, d)
    layout = Layout(d_model=d, blocks=(("short_swa",),))
    config = twoaxis.parse_spec("sequence", f"short_swa(window={K or L}, n_heads=1, position='none')")
    mixer = twoaxis.methods("sequence")["short_swa"](config, layout, 0).double()
    for layer, block in enumerate(model.blocks):
        read = block.connections[0].window_read
        unused = torch.zeros(d, d, dtype=torch.float64)  # a read of one state has no W_Q and W_K
        parts = [unused if part is None else part.weight for part in (read.query, read.key, read.value)]
        mixer.qkv.weight.data = torch.cat(parts)
        mixer.out.weight.data = read.output.weight.data if output else torch.eye(d, dtype=torch.float64)
        y = mixer(Reads(tokens_are_layers), Context()).unflatten(0, (2, 4))
        torch.testing.assert_close(z[layer], y[:, :, layer], rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_absorbed_cached_and_explicit_projections_agree(n):
    torch.manual_seed(n)
    layout = Layout(d_model=9, blocks=(("mlp",),), init_std=0.5)
    read = WindowRead(DepthWindow.Config(output=True), layout, n).double()
    torch.nn.init.normal_(read.value.weight)
    states = tuple(torch.randn(2, 3, 9, dtype=torch.float64, requires_grad=True) for _ in range(n))
    W = torch.stack(states, dim=2)  # (B, T, n, d)
    q = states[-1] @ read.query.weight.T
    scores = (W @ read.key.weight.T @ q[..., None]).squeeze(-1) / math.sqrt(9)
    explicit = (scores.softmax(-1)[..., None] * (W @ read.value.weight.T)).sum(-2) @ read.output.weight.T
    keys, values = zip(*[read.project(state) for state in states], strict=True)
    weights, cotangent = tuple(read.parameters()), torch.randn(2, 3, 9, dtype=torch.float64)
    expected = torch.autograd.grad(explicit, (*states, *weights), cotangent)
    for z in (read(states), read.attend(states[-1], keys, values)):
        torch.testing.assert_close(z, explicit, rtol=0, atol=1e-12)
        gradients = torch.autograd.grad(z, (*states, *weights), cotangent)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("K", [4, 5, 50])
def test_a_window_as_long_as_the_network_is_full_memory(K):
    full, window = decoder("depth_window", 4), decoder(f"depth_window(window_blocks={K})", 4)
    tokens = torch.randint(19, (2, 5))
    assert torch.equal(full(tokens), window(tokens))


def test_the_read_enters_the_stream_before_the_block():
    model = decoder("depth_window(window_blocks=2)", 1)
    tokens = torch.randint(19, (1, 3))
    (h, after), (z,) = trajectory(model, tokens)
    x = h + z
    for connection, core in zip(model.blocks[0].connections, model.blocks[0].cores, strict=True):
        x = x + core(Reads(connection.norm(x)), Context())
    torch.testing.assert_close(after, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["depth_window", "depth_window(window_blocks=2, shared=False, output=True)"])
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_starts_exactly_as_the_standard_transformer(spec, n_blocks):
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, n_blocks=n_blocks, **SIZES))
    plain = twoaxis.Decoder(twoaxis.ModelConfig(n_blocks=n_blocks, **SIZES))
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(19, (2, 7))
    assert torch.equal(model(tokens), plain(tokens))


# pitfalls, parallel training: "each method with L=1, 2, 3: list parameters with no gradient after one step"
@pytest.mark.parametrize("n_blocks", [1, 2, 3])
@pytest.mark.parametrize(
    "options", ["", "window_blocks=1", "shared=False", "shared=False, window_blocks=2, output=True"]
)
def test_every_parameter_has_a_gradient(n_blocks, options):
    model = decoder(f"depth_window({options})", n_blocks)
    tokens = torch.randint(19, (2, 7))
    model.loss(tokens, tokens.roll(1, 1)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_shared_projections_are_registered_once_and_copied_together(tmp_path):
    model = decoder("depth_window(window_blocks=2)", 3)
    names = [name for name in model.state_dict() if "window_read" in name]
    assert names == [f"stream.window_read.{part}.weight" for part in ("query", "key", "value")]
    assert not any(model.param_rules()[name].decay for name in names)
    twin = copy.deepcopy(model)
    reads = {id(block.connections[0].window_read) for block in twin.blocks}
    assert reads == {id(twin.stream.window_read)}
    assert id(model.stream.window_read) not in reads
    twoaxis.save(model, tmp_path)
    tokens = torch.randint(19, (2, 5))
    assert torch.equal(twoaxis.load(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize(
    ("options", "matrices"),
    [
        ("", 3),
        ("window_blocks=1", 1),
        ("output=True", 4),
        ("shared=False", 1 + 3 + 3),
        ("shared=False, output=True", 10),
    ],
)
def test_a_read_of_one_state_owns_no_query_and_key(options, matrices):
    # scores and mix: two reads, of 2 and 3 states
    layout = Layout(d_model=8, blocks=(("attention", "mlp"),) * 3)
    config = twoaxis.parse_spec("depth", f"depth_window({options})")
    cost = config.cost(Shape(layout=layout, batch_size=1, seq_len=5))
    stream, blocks = build(config, 8, layout.blocks)
    modules = [stream, *(c for connections in blocks for c in connections)]
    built = sum(p.numel() for m in modules for p in m.parameters())
    assert cost.parameters == built == 7 * 8 + matrices * 64


def test_keeps_the_window_and_after_the_last_block_only_its_state():
    stream, _ = build("depth_window(window_blocks=3)", 4, [["mlp"]] * 5)
    held = [[int(name.rpartition(".")[2]) for name in stream.state_spec(n, 1, 1)] for n in range(6)]
    assert held == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [5]]


def test_shared_projections_need_the_whole_network():
    layout = Layout(d_model=4, blocks=(("mlp",),) * 2)
    with pytest.raises(twoaxis.InputError, match=r"use DepthWindow\.network"):
        DepthWindow.for_block(DepthWindow.Config(), layout, 0)


@pytest.mark.parametrize("bad", ["window_blocks=0", "window_blocks=True", "injection='replace'", "shared=1"])
def test_refuses(bad):
    with pytest.raises(twoaxis.InputError, match="allowed is"):
        twoaxis.parse_spec("depth", f"depth_window({bad})")
