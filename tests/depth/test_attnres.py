"""Attention Residuals: the equation in both forms, where a depth-block ends, and the standard start."""

import pytest
import torch
from torch import nn

import twoaxis
from twoaxis.depth import build, named_tensors
from twoaxis.types import Context, Layout, Shape


def read(w, g, sources, eps):
    """READ(w, g; V) with plain loops over the sources."""
    logits = torch.stack(
        [((w * g) * v / (v.square().mean(-1, keepdim=True) + eps).sqrt()).sum(-1) for v in sources]
    )
    return sum(a[..., None] * v for a, v in zip(logits.softmax(0), sources, strict=True))


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("G", [None, 1, 2, 3, 5, 99], ids=lambda G: f"G{G}")
@pytest.mark.parametrize("kinds", [("mlp",), ("attention", "mlp"), ("attention", "mlp", "mlp")], ids=len)
def test_equals_the_equations_and_every_source_appears_once(G, kinds):
    d, L, eps, ctx = 6, 4, 1e-3, Context()
    torch.manual_seed(1)
    spec = f"attnres(block_sublayers={G}, key_norm_eps={eps}, scale_eps=False)"
    stream, blocks = build(spec, d, [kinds] * L, norm_eps=0.1)
    randomised(stream.double())
    x0 = torch.randn(2, 3, d, dtype=torch.float64)
    state, size = stream.open(x0, ctx), G or 1
    closed, partial = [x0], []  # b_0 .. b_{n-1} and the outputs of the open depth-block
    for connection in (c for connections in blocks for c in connections):
        randomised(connection.double())
        sources = [*closed, sum(partial)] if partial else closed
        route = connection.route
        h = sources[0] if route is None else read(route.query, route.key_gain, sources, eps)
        assert (route is None) == (len(sources) == 1)
        torch.testing.assert_close(connection.mixture(state), h, rtol=0, atol=1e-12)
        reads, carry = connection.read(state, ctx)
        normed = connection.norm.weight * h / (h.square().mean(-1, keepdim=True) + 0.1).sqrt()
        torch.testing.assert_close(reads.x, normed, rtol=0, atol=1e-12)
        y = torch.randn_like(x0)
        state = connection.write(state, carry, y, ctx)
        partial.append(y)
        if len(partial) == size:
            closed, partial = [*closed, sum(partial)], []
        expected = [*closed, sum(partial)] if partial else closed
        assert ("partial" in state) == bool(partial)
        for held, made in zip(named_tensors(state).values(), expected, strict=True):
            torch.testing.assert_close(held, made, rtol=0, atol=1e-12)
    out = read(stream.route.query, stream.route.key_gain, expected, eps)
    out = stream.norm.weight * out / (out.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(stream.close(state, ctx), out, rtol=0, atol=1e-12)


ZERO_QUERY = ["attnres", "attnres(block_sublayers=3)", "attnres(block_sublayers=4, readout='sum')"]


def against_standard(spec, norm_eps, n_blocks=4):
    """Largest relative difference of logits to the standard Transformer with the same other weights."""
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": n_blocks, "n_heads": 3, "norm_eps": norm_eps}
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, **sizes)).double()
    with torch.no_grad():  # embeddings keep their std of 0.02
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "key_gain", "out.weight", "down.weight")):
                parameter.copy_(torch.randn_like(parameter))
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**sizes)).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(19, (2, 7))
    expected = plain(tokens).detach()
    return float((model(tokens).detach() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("spec", ZERO_QUERY)
@pytest.mark.parametrize("norm_eps", [0.0, 1e-6, 1e-3])
def test_zero_queries_are_the_standard_transformer(spec, norm_eps):
    assert against_standard(spec, norm_eps) < 1e-12


@pytest.mark.parametrize("spec", ["attnres(scale_eps=False)", "attnres(block_sublayers=3, scale_eps=False)"])
def test_without_scaled_eps_the_start_is_standard_up_to_eps_only(spec):
    # h_s is n times smaller than the stream, so that eps acts as n^2 eps
    assert against_standard(spec, 0.0) < 1e-12
    assert against_standard(spec, 1e-6) > 1e-6
    assert twoaxis.parse_spec("depth", spec).standard_start() == "up to eps"


def test_one_sublayer_per_block_is_the_full_form():
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": 3, "n_heads": 3}
    torch.manual_seed(0)
    full = randomised(twoaxis.Decoder(twoaxis.ModelConfig(depth="attnres", **sizes)).double())
    block = twoaxis.Decoder(twoaxis.ModelConfig(depth="attnres(block_sublayers=1)", **sizes)).double()
    block.load_state_dict(full.state_dict())
    tokens = torch.randint(19, (2, 5))
    assert torch.equal(full(tokens), block(tokens))


@pytest.mark.parametrize(
    ("spec", "reads", "per_read"),
    [
        ("attnres", 8, 2),
        ("attnres(readout='sum')", 7, 2),
        ("attnres(key_gain=False)", 8, 1),
        ("attnres(block_sublayers=3, key_gain=False, readout='sum')", 7, 1),
    ],
)
def test_every_read_but_the_first_owns_weights(spec, reads, per_read):
    model = twoaxis.Decoder(twoaxis.ModelConfig(d_model=8, n_blocks=4, n_heads=2, depth=spec))
    owned = {n: p for n, p in model.named_parameters() if "route" in n}
    assert not any(n.startswith("blocks.0.connections.0.") for n in owned)
    assert sum(p.numel() for p in owned.values()) == reads * per_read * 8
    assert not any(model.param_rules()[n].decay for n in owned)
    assert all(bool((p == ("gain" in n)).all()) for n, p in owned.items())  # queries 0, gains 1


@pytest.mark.parametrize(
    ("G", "counts"), [(1, [2, 3, 4, 5, 6, 7]), (2, [2, 2, 3, 3, 4, 4]), (4, [2, 2, 2, 2, 3, 3])]
)
def test_cost_counts_the_sources_of_each_read(G, counts):
    layout = Layout(d_model=8, blocks=(("attention", "mlp"),) * 3)
    config = twoaxis.parse_spec("depth", f"attnres(block_sublayers={G})")
    cost = config.cost(Shape(layout=layout, batch_size=2, seq_len=5))
    assert config.reads(layout) == counts
    assert cost.flops_forward == 6 * sum(counts) * 8 * 10
    assert cost.boundary_bytes == {"full": counts[-1] * 10 * 8 * 4}


def test_sum_readout_is_the_standard_stream():
    stream, blocks = build("attnres(block_sublayers=2, readout='sum')", 4, [["mlp"]] * 5)
    x0 = torch.randn(2, 3, 4)
    state, outputs = stream.open(x0, Context()), []
    for (connection,) in blocks:
        outputs.append(torch.randn(2, 3, 4))
        state = connection.write(state, None, outputs[-1], Context())
    torch.testing.assert_close(stream.mixture(state), x0 + sum(outputs))


@pytest.mark.parametrize(
    "bad", ["block_sublayers=0", "block_sublayers=True", "key_norm_eps=-1", "readout='mean'"]
)
def test_refuses(bad):
    with pytest.raises(twoaxis.InputError, match="allowed is"):
        twoaxis.parse_spec("depth", f"attnres({bad})")


def test_outputs_of_another_dtype_are_kept_in_the_states_dtype():
    stream, blocks = build("attnres(block_sublayers=2)", 6, [["mlp"]] * 3)
    core = nn.Linear(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        state = stream.open(torch.randn(1, 2, 6), Context())
        for (connection,) in blocks:
            state = connection(state, lambda reads, ctx: core(reads.x), Context())
            assert {t.dtype for t in named_tensors(state).values()} == {torch.float32}


VARIED = [
    "heads=3",
    "query='input'",
    "key_rank=4",
    "key_rank=4, query='input', key_gain=False",
    "window_sources=2",
    "window_sources=2, sink=False",
    "window_sources=1, sink=False, block_sublayers=2",
    "window_sources=2, block_sublayers=3, heads=2, query='input'",
]


def varied_read(route, sources, norm):
    """READ by loops over heads and sources, with a made query and keys of low rank, then the norm."""
    if route is None:
        return norm(sources[0])
    d, r, n = sources[0].shape[-1], route.rank, len(sources)
    rms = [
        v[..., d - r :] / (v[..., d - r :].square().mean(-1, keepdim=True) + route.eps).sqrt()
        for v in sources
    ]
    keys = rms if route.key_gain is None else [route.key_gain * k for k in rms]
    query = route.query
    if query.ndim == 2:
        newest = sources[-1]
        query = (newest / (newest.square().mean(-1, keepdim=True) + route.eps).sqrt()) @ query.T
    parts = []
    for h in range(route.heads):
        k, v = (slice(h * x // route.heads, (h + 1) * x // route.heads) for x in (r, d))
        logits = torch.stack([(query[..., k] * key[..., k]).sum(-1) for key in keys])
        parts.append(sum(a[..., None] * s[..., v] for a, s in zip(logits.softmax(0), sources, strict=True)))
    h = torch.cat(parts, -1)
    return norm.weight * h / (h.square().mean(-1, keepdim=True) + norm.eps / n**2).sqrt()


@pytest.mark.parametrize("options", VARIED)
def test_heads_made_queries_low_rank_keys_and_windows(options):
    torch.manual_seed(1)
    d, ctx = 6, Context()
    config = twoaxis.parse_spec("depth", f"attnres({options}, key_norm_eps=1e-3)")
    stream, blocks = build(config, d, [("attention", "mlp")] * 4, norm_eps=0.1)
    randomised(stream.double())
    x0 = torch.randn(2, 3, d, dtype=torch.float64)
    state, size, K = stream.open(x0, ctx), config.size, config.window_sources
    closed, partial = [x0], []

    def seen():
        every = [*closed, sum(partial)] if partial else closed
        return (
            every
            if K is None
            else [s for i, s in enumerate(every) if i >= len(every) - K or (config.sink and not i)]
        )

    for connection in (c for connections in blocks for c in connections):
        randomised(connection.double())
        reads, carry = connection.read(state, ctx)
        assert (connection.route is None) == (len(seen()) == 1)
        expected = varied_read(connection.route, seen(), connection.norm)
        torch.testing.assert_close(reads.x, expected, rtol=0, atol=1e-12)
        y = torch.randn_like(x0)
        state = connection.write(state, carry, y, ctx)
        partial.append(y)
        if len(partial) == size:
            closed, partial = [*closed, sum(partial)], []
        assert len(named_tensors(state)) == len(seen())  # what no later read sees is dropped
    torch.testing.assert_close(
        stream.close(state, ctx), varied_read(stream.route, seen(), stream.norm), rtol=0, atol=1e-12
    )


def test_one_head_and_full_rank_are_the_plain_read():
    spec = ["attnres", "attnres(heads=1)", "attnres(key_rank=12)", "attnres(window_sources=99)"]
    tokens, outputs = torch.randint(19, (2, 7)), []
    for s in spec:
        torch.manual_seed(0)
        model = twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=19, d_model=12, n_heads=3, depth=s)).double()
        torch.manual_seed(1)
        outputs.append(randomised(model)(tokens))
    assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


@pytest.mark.parametrize(
    "options", ["heads=3", "query='input'", "key_rank=5", "block_sublayers=2, query='input'"]
)
def test_variants_start_as_the_standard_transformer(options):
    assert against_standard(f"attnres({options})", 1e-6) < 1e-12


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("heads=0", "allowed is 1 or more"),
        ("heads=2, key_rank=3", "both cut the keys"),
        ("window_sources=2, readout='sum'", "needs every source"),
        ("sink=False", "is for a window"),
    ],
)
def test_refuses_variants(bad, why):
    with pytest.raises(twoaxis.InputError, match=why):
        twoaxis.parse_spec("depth", f"attnres({bad})")


@pytest.mark.parametrize("bad", ["heads=5", "key_rank=13"])
def test_refuses_what_the_width_does_not_allow(bad):
    with pytest.raises(twoaxis.InputError, match="at d_model=12"):
        build(f"attnres({bad})", 12, [["mlp"]] * 2)
