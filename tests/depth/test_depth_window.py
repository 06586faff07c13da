"""The depth window: one operator on two axes, its three ways of computing, and who owns its projections."""

import copy
import math

import pytest
import torch

import twoaxis
from twoaxis.depth import DepthWindow, build
from twoaxis.depth.window_read import WindowRead
from twoaxis.ops import local_attention
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


def as_short_swa(read, K, d):
    """The ShortSWA mixer over layers that has the weights of a depth read."""
    cfg = read.cfg
    layout = Layout(d_model=d, blocks=(("short_swa",),), rope_base=read.layout.rope_base)
    spec = f"short_swa(window={K}, n_heads={cfg.heads}, position={cfg.position!r})"
    mixer = twoaxis.methods("sequence")["short_swa"](twoaxis.parse_spec("sequence", spec), layout, 0).double()
    unused = torch.zeros(d, d, dtype=torch.float64)  # a read of one state has no W_Q and W_K
    parts = [unused if part is None else part.weight for part in (read.query, read.key, read.value)]
    mixer.qkv.weight.data = torch.cat(parts)
    mixer.out.weight.data = read.output.weight.data if cfg.output else torch.eye(d, dtype=torch.float64)
    if read.bias is not None:
        mixer.position_bias.data[:, : read.bias.shape[1]] = read.bias.data
    return mixer


@pytest.mark.parametrize("K", [1, 2, 3, None], ids=lambda K: f"K{K}")
@pytest.mark.parametrize(
    "options",
    ["", "output=True", "heads=3", "heads=2, position='rope'", "heads=3, position='bias', output=True"],
)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per_block"])
def test_is_short_swa_over_the_transposed_stack(K, options, shared):
    if K == 1 and ("heads" in options or "position" in options):
        pytest.skip("refused: nothing to choose from")
    L, d = 5, 12
    model = decoder(f"depth_window(window_blocks={K}, shared={shared}, {options})".replace(", )", ")"), L)
    H, z = trajectory(model, torch.randint(19, (2, 4)))
    tokens_are_layers = torch.stack(H[:-1], dim=2).flatten(0, 1)  # (B T, L, d)
    for layer, block in enumerate(model.blocks):
        mixer = as_short_swa(block.connections[0].window_read, K or L, d)
        y = mixer(Reads(tokens_are_layers), Context()).unflatten(0, (2, 4))
        torch.testing.assert_close(z[layer], y[:, :, layer], rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 3, None], ids=lambda K: f"K{K}")
def test_is_local_attention_over_the_transposed_stack(window):
    """The operator itself, heads and bias included, on keys and values projected by hand."""
    L = 4
    options = "" if window == 1 else ", heads=3, position='bias'"
    model = decoder(f"depth_window(window_blocks={window}{options})", L)
    H, z = trajectory(model, torch.randint(19, (2, 3)))
    read = model.stream.window_read
    W = torch.stack(H[:-1], dim=2).flatten(0, 1)  # (B T, L, d)
    heads = 1 if window == 1 else 3
    q, k, v = (
        (W if part is None else part(W)).unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in (read.query, read.key, read.value)
    )
    out = local_attention(q, k, v, window, position_bias=read.bias if window else None)
    if window is None:  # full attention takes no bias: a window of L is the same
        out = local_attention(q, k, v, L, position_bias=read.bias)
    y = out.transpose(1, 2).flatten(2).unflatten(0, (2, 3))
    torch.testing.assert_close(torch.stack(z, 2), y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("options", [{"position": "bias"}, {"position": "rope"}, {}], ids=str)
def test_absorbed_and_cached_projections_of_heads_agree(n, options):
    torch.manual_seed(n)
    layout = Layout(d_model=12, blocks=(("mlp",),), init_std=0.5)
    read = WindowRead(DepthWindow.Config(output=True, heads=3, **options), layout, n).double()
    torch.nn.init.normal_(read.value.weight)
    if read.bias is not None:
        torch.nn.init.normal_(read.bias)
    states = tuple(torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True) for _ in range(n))
    weights, cotangent = tuple(read.parameters()), torch.randn(2, 3, 12, dtype=torch.float64)
    keys, values = zip(*[read.project(state) for state in states], strict=True)
    absorbed, cached = read(states), read.attend(states[-1], keys, values)
    torch.testing.assert_close(absorbed, cached, rtol=0, atol=1e-12)
    first, second = (torch.autograd.grad(z, (*states, *weights), cotangent) for z in (absorbed, cached))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("injection", ["replace", "gated"])
def test_other_injections(injection):
    model = decoder(f"depth_window(window_blocks=2, injection={injection!r})", 2)
    tokens = torch.randint(19, (1, 3))
    _, states = model(tokens, return_states=True)
    (_, h, _), (_, z) = trajectory(model, tokens)
    _, x = model.blocks[1].connections[0].read(states["block.1"], Context())
    expected = z
    if injection == "gated":
        gate, inner = model.stream.window_read.gate, h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        expected = h + torch.sigmoid(inner @ gate.weight[0] + gate.bias)[..., None] * z
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


def test_replacement_starts_as_an_average_of_the_window():
    """W_V and W_O start at the identity, and over one state that is the standard Transformer."""
    model = twoaxis.Decoder(
        twoaxis.ModelConfig(depth="depth_window(injection='replace', output=True)", n_blocks=2, **SIZES)
    )
    tokens = torch.randint(19, (1, 3))
    _, states = model(tokens, return_states=True)
    read = model.blocks[1].connections[0]
    state = states["block.1"]
    weights = read.window_read.weights(
        state["sources"].sources[-1], tuple(map(read.window_read.key, state["sources"].sources))
    )
    average = sum(
        w[..., None] * s for w, s in zip(weights[..., 0, :].unbind(-1), state["sources"].sources, strict=True)
    )
    torch.testing.assert_close(read.read(state, Context())[1], average)
    assert ((weights > 0.4) & (weights < 0.6)).all()


@pytest.mark.parametrize(
    "spec",
    [
        "depth_window",
        "depth_window(window_blocks=2, shared=False, output=True)",
        "depth_window(heads=3, position='bias', injection='gated')",
        "depth_window(window_blocks=1, injection='replace', output=True)",
    ],
)
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
    ("options", "matrices", "more"),
    [
        ("", 3, 0),
        ("window_blocks=1", 1, 0),
        ("output=True", 4, 0),
        ("shared=False", 1 + 3 + 3, 0),
        ("shared=False, output=True", 10, 0),
        ("heads=4, position='rope'", 3, 0),
        ("heads=4, position='bias'", 3, 4 * 3),
        ("heads=2, position='bias', shared=False", 7, 2 * (2 + 3)),
        ("injection='gated'", 3, 9),
        ("injection='gated', shared=False", 7, 3 * 9),
        ("injection='replace'", 3, 0),
    ],
)
def test_a_read_of_one_state_owns_no_query_and_key(options, matrices, more):
    # scores and mix: two reads, of 2 and 3 states
    layout = Layout(d_model=8, blocks=(("attention", "mlp"),) * 3)
    config = twoaxis.parse_spec("depth", f"depth_window({options})")
    cost = config.cost(Shape(layout=layout, batch_size=1, seq_len=5))
    stream, blocks = build(config, 8, layout.blocks)
    modules = [stream, *(c for connections in blocks for c in connections)]
    built = sum(p.numel() for m in modules for p in m.parameters())
    assert cost.parameters == built == 7 * 8 + matrices * 64 + more


def test_keeps_the_window_and_after_the_last_block_only_its_state():
    stream, _ = build("depth_window(window_blocks=3)", 4, [["mlp"]] * 5)
    held = [[int(name.rpartition(".")[2]) for name in stream.state_spec(n, 1, 1)] for n in range(6)]
    assert held == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [5]]


def test_shared_projections_need_the_whole_network():
    layout = Layout(d_model=4, blocks=(("mlp",),) * 2)
    with pytest.raises(twoaxis.InputError, match=r"use DepthWindow\.network"):
        DepthWindow.for_block(DepthWindow.Config(), layout, 0)


@pytest.mark.parametrize(
    "bad",
    ["window_blocks=0", "window_blocks=True", "injection='mean'", "shared=1", "heads=0", "position='sine'"],
)
def test_refuses(bad):
    with pytest.raises(twoaxis.InputError, match="allowed is"):
        twoaxis.parse_spec("depth", f"depth_window({bad})")


@pytest.mark.parametrize("idle", ["heads=2", "position='bias'", "position='rope'"])
def test_refuses_what_one_state_cannot_use(idle):
    with pytest.raises(twoaxis.InputError, match="leave out heads and position"):
        twoaxis.parse_spec("depth", f"depth_window(window_blocks=1, {idle})")


@pytest.mark.parametrize("options", ["heads=5", "heads=4, position='rope'"])
def test_refuses_heads_that_do_not_fit(options):
    with pytest.raises(twoaxis.InputError, match="d_model=12 is not cut into such heads"):
        twoaxis.Decoder(twoaxis.ModelConfig(depth=f"depth_window({options})", n_blocks=2, **SIZES))
