"""DenseFormer: its equation, its start, and the smallest state that its later mixes need."""

import pytest
import torch
from torch import nn

import twoaxis
from twoaxis.depth import build, named_tensors
from twoaxis.types import Context, Layout, Shape

SIZES = [(1, 1, 1), (1, 2, 1), (5, 1, 1), (5, 2, 1), (6, 1, 2), (7, 3, 2), (7, 4, 5), (4, 1, 9)]


def ids(size):
    return "L{}_{}x{}".format(*size)


@pytest.mark.parametrize("size", SIZES, ids=ids)
def test_equals_the_equation_over_raw_block_outputs(size):
    L, k, p = size
    torch.manual_seed(L)
    d, ctx = 5, Context()
    stream, blocks = build(f"denseformer(dilation={k}, period={p})", d, [["attention", "mlp"]] * L)
    stream.double()
    X, Y, W = [torch.randn(2, 3, d, dtype=torch.float64)], None, torch.randn(2, d, d, dtype=torch.float64)
    cores = [lambda reads, ctx, W=w: (reads.x @ W).tanh() for w in W]
    state = stream.open(X[0], ctx)
    Y = X[0]
    for n, connections in enumerate(blocks, start=1):
        for connection, core in zip(connections, cores, strict=True):
            connection.norm = nn.Identity()
            if connection.alpha is not None:
                connection.alpha.data = torch.randn_like(connection.alpha, dtype=torch.float64)
            state = connection(state, core, ctx)
        middle = Y + (Y @ W[0]).tanh()
        X.append(middle + (middle @ W[1]).tanh())
        Y = X[n]
        if n % p == 0:
            chosen = [j for j in range(n + 1) if (n - j) % k == 0]
            alpha = connections[-1].alpha
            assert alpha.shape == (n // k + 1,)
            Y = sum(a * X[j] for a, j in zip(alpha, chosen, strict=True))
        torch.testing.assert_close(state["stream"], Y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES, ids=ids)
def test_keeps_exactly_the_sources_that_later_mixes_read(size):
    L, k, p = size
    config = twoaxis.parse_spec("depth", f"denseformer(dilation={k}, period={p})")
    for n in range(L + 1):
        read_later = {j for m in range(n + 1, L + 1) for j in config.mixed(m) if j <= n}
        assert config.kept(n, L) == sorted(read_later)
    stream, _ = build(config, 4, [["mlp"]] * L)
    assert list(stream.state_spec(L, 1, 1)) == ["stream"]


@pytest.mark.parametrize(
    ("spec", "blocks", "weights"),
    [
        ("denseformer", 12, 90),
        ("denseformer", 72, 2700),
        ("denseformer(dilation=4, period=5)", 48, 62),
        ("denseformer(period=5)", 4, 0),
    ],
)
def test_counts_of_the_paper(spec, blocks, weights):
    layout = Layout(d_model=8, blocks=(("attention", "mlp"),) * blocks)
    cost = twoaxis.parse_spec("depth", spec).cost(Shape(layout=layout, batch_size=1, seq_len=3))
    assert cost.parameters - (2 * blocks + 1) * 8 == weights
    assert cost.flops_forward == 2 * weights * 8 * 3


def test_boundary_counts_the_stream_and_the_sources_still_read():
    # 4x5 with 48 blocks: after 39 the later mixes are 40 (sources 0, 4, .. 36) and 45 (1, 5, .. 37)
    stream, _ = build("denseformer(dilation=4, period=5)", 4, [["mlp"]] * 48)
    assert len(stream.state_spec(39, 1, 1)) == 1 + 10 + 10
    assert "sources.source.38" not in stream.state_spec(39, 1, 1)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 5])
def test_starts_exactly_as_the_standard_transformer(n_blocks):
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": n_blocks, "n_heads": 3}
    tokens = torch.randint(19, (2, 7))
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth="denseformer", **sizes))
    torch.manual_seed(0)
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**sizes))
    assert torch.equal(model(tokens), plain(tokens))


def test_mixing_weights_start_one_hot_and_do_not_decay():
    model = twoaxis.Decoder(twoaxis.ModelConfig(d_model=8, n_blocks=3, n_heads=2, depth="denseformer"))
    rules = model.param_rules()
    names = [name for name in rules if name.endswith("alpha")]
    assert len(names) == 3
    for n, name in enumerate(names, start=1):
        assert model.get_parameter(name).tolist() == [0.0] * n + [1.0]
        assert not rules[name].decay


def test_stream_and_mix_stay_float32_under_autocast():
    stream, blocks = build("denseformer", 6, [["mlp"]] * 2)
    core = nn.Linear(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        state = stream.open(torch.randn(1, 2, 6), Context())
        for (connection,) in blocks:
            state = connection(state, lambda reads, ctx: core(reads.x), Context())
            assert {t.dtype for t in named_tensors(state).values()} == {torch.float32}


@pytest.mark.parametrize("option", ["dilation", "period"])
def test_refuses_steps_below_one(option):
    with pytest.raises(twoaxis.InputError, match=f"denseformer\\({option}=0\\): allowed is 1 or more"):
        twoaxis.parse_spec("depth", f"denseformer({option}=0)")


@pytest.mark.parametrize(("L", "k", "p"), [(6, 1, 2), (6, 2, 2), (7, 2, 3), (9, 3, 1)])
def test_sources_by_period_are_outputs_after_mixes(L, k, p):
    # the training code keeps the output of every p-th block alone and counts the dilation over those
    config = twoaxis.parse_spec("depth", f"denseformer(dilation={k}, period={p}, sources='period')")
    stored = [0]
    for n in range(1, L + 1):
        if n % p:
            assert not config.mixed(n)
            continue
        stored.append(n)
        newest = len(stored) - 1
        assert list(config.mixed(n)) == [j for i, j in enumerate(stored) if (newest - i) % k == 0]
        read_later = {j for m in range(n + 1, L + 1) for j in config.mixed(m) if j <= n}
        assert config.kept(n, L) == sorted(read_later)
    if p == 1:
        package = twoaxis.parse_spec("depth", f"denseformer(dilation={k})")
        assert [config.mixed(n) for n in range(L + 1)] == [package.mixed(n) for n in range(L + 1)]
