"""MUDDFormer: the equations with 1 to 4 ways, its norms, widths and start, and how it leaves depth attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import twoaxis
from twoaxis.depth import build, named_tensors
from twoaxis.ops.reference import rms
from twoaxis.types import Context, Layout, Shape

CTX = Context()


def randomised(*modules):
    for module in modules:
        for parameter in module.double().parameters():
            parameter.data = 0.3 * torch.randn_like(parameter)


def mixture(mix, X, newest, eps, gelu="none"):
    """sum_j A[c, j] X_j with A = W2 gelu(W1 rms(newest)) + a, by loops; (C, B, T, d)."""
    C, n = mix.static.shape
    h = rms(newest, eps) * (1 if mix.gain is None else mix.gain)
    h = F.gelu(h @ mix.down.T, approximate=gelu) if mix.down is not None else None
    Z = []
    for c in range(C):
        total = 0
        for j in range(n):
            A = mix.static[c, j] + (0 if h is None else (h @ mix.up[c * n + j])[..., None])
            total = total + A * X[j]
        Z.append(total)
    return Z


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", [("attention", "mlp"), ("mlp", "short_swa", "mlp")], ids=["usual", "late"])
def test_equals_the_equations(kinds, ways, dynamic):
    torch.manual_seed(0)
    L, d, eps = 3, 6, 1e-3
    stream, blocks = build(f"muddformer(ways={ways}, dynamic={dynamic})", d, [kinds] * L, norm_eps=eps)
    randomised(stream, *(c for connections in blocks for c in connections))
    x = torch.randn(2, 3, d, dtype=torch.float64)
    state, X = stream.open(x, CTX), [x]
    takes = next(i for i, kind in enumerate(kinds) if kind != "mlp")
    for n, connections in enumerate(blocks):
        Z = {"r": X[0]}
        if n:
            names = "qkvr"[4 - ways :]
            Z = dict(zip(names, mixture(connections[0].mix, X, X[-1], eps), strict=True))
        branch = 0
        for i, connection in enumerate(connections):
            own = {c: Z.get(c, Z["r"]) + branch for c in "qkvr"}
            reads, carry = connection.read(state, CTX)
            for norm, given, way in (
                (connection.norm, reads.x, "q" if i == takes else "r"),
                (connection.key_norm, reads.key, "k"),
                (connection.value_norm, reads.value, "v"),
            ):
                assert (norm is None) == (given is None)
                if norm is not None:
                    expected = norm.weight * rms(own[way], eps)
                    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
            assert (connection.key_norm is not None) == (n > 0 and i == takes and ways > 2)
            assert (connection.value_norm is not None) == (n > 0 and i == takes and ways > 1)
            y = torch.randn_like(x)
            state, branch = connection.write(state, carry, y, CTX), branch + y
        X.append(Z["r"] + branch)
        assert list(named_tensors(state)) == [f"sources.source.{j}" for j in range(n + 2)]  # never the ways
        torch.testing.assert_close(state["sources"].sources[-1], X[-1], rtol=0, atol=1e-12)
    (expected,) = mixture(stream.mix, X, X[-1], eps)
    torch.testing.assert_close(stream.mixture(state), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_pre_and_post_norm(form):
    torch.manual_seed(0)
    L, d, eps = 3, 6, 1e-3
    spec = f"muddformer(pre_post_norm=True, pre_post_form={form!r}, gelu='tanh')"
    stream, blocks = build(spec, d, [["attention", "mlp"]] * L, norm_eps=eps)
    randomised(stream, *(c for connections in blocks for c in connections))
    X = [torch.randn(2, 3, d, dtype=torch.float64)]
    state = stream.open(X[0], CTX)
    gains = [stream.source_norm.weight, *(connections[-1].source_norm.weight for connections in blocks)]
    mixes = [*(connections[0].mix for connections in blocks[1:]), stream.mix]
    for n, connections in enumerate(blocks):
        for connection in connections:
            _, carry = connection.read(state, CTX)
            state = connection.write(state, carry, torch.randn_like(X[0]), CTX)
        X.append(state["stream"])
        normed = [g * rms(x, eps) for g, x in zip(gains, X, strict=False)]
        for held, made in zip(state["sources"].sources, normed, strict=True):
            torch.testing.assert_close(held, made, rtol=0, atol=1e-12)
        Z = mixture(mixes[n], normed, X[-1], eps, gelu="tanh")
        outer = mixes[n].post_norm.weight
        expected = [
            X[-1] + (outer * rms(z, eps) if form == "paper" or c == len(Z) - 1 else z)
            for c, z in enumerate(Z)
        ]
        found = mixes[n](state["sources"].sources, X[-1])
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-12)
        assert (mixes[n].gain is not None) == (form == "code")


START = [
    "",
    "ways=1",
    "ways=2, dynamic=False",
    "pre_post_norm=True",
    "pre_post_norm=True, pre_post_form='code'",
]


@pytest.mark.parametrize("options", START, ids=str)
def test_starts_exactly_as_the_standard_transformer(options):
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": 3, "n_heads": 3}
    tokens = torch.randint(19, (2, 7))
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=f"muddformer({options})", **sizes)).double()
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**sizes)).double()
    shared = {n: model.state_dict().get(n, w) for n, w in plain.state_dict().items()}
    plain.load_state_dict(shared)
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-14)  # other order of sums


def test_one_static_way_is_denseformer():
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": 4, "n_heads": 3}
    tokens = torch.randint(19, (2, 7))
    one = twoaxis.Decoder(twoaxis.ModelConfig(depth="muddformer(ways=1, dynamic=False)", **sizes)).double()
    other = twoaxis.Decoder(twoaxis.ModelConfig(depth="denseformer", **sizes)).double()
    other.load_state_dict({n: one.state_dict().get(n, w) for n, w in other.state_dict().items()})
    mixes = [*(one.blocks[n].connections[0].mix for n in range(1, 4)), one.stream.mix]
    for n, mix in enumerate(mixes):
        mix.static.data = torch.randn_like(mix.static)
        other.blocks[n].connections[-1].alpha.data = mix.static[0].clone()
    torch.testing.assert_close(one(tokens), other(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rounded", "expanded"), [(True, True), (False, True), (False, False)])
def test_counts_of_the_paper(rounded, expanded):
    # L = 32, d = 2560: 5.9 M weights exact, 8.8 M with the released round64
    L, d = 32, 2560
    layout = Layout(d_model=d, blocks=(("attention", "mlp"),) * L)
    config = twoaxis.parse_spec("depth", f"muddformer(round64={rounded}, expand_last={expanded})")
    cost = config.cost(Shape(layout=layout, batch_size=1, seq_len=1))
    weights = cost.parameters - (2 * L + 1) * d - 2 * (L - 1) * d
    known = {(True, True): 8.8e6, (False, True): 5.9e6}
    if (rounded, expanded) in known:
        assert weights == pytest.approx(known[rounded, expanded], rel=0.01)
    assert config.hidden(33, 1, True) == (192 if rounded else 132 if expanded else 33)
    assert twoaxis.parse_spec("depth", "muddformer").hidden(16, 4, False) == 128  # rounding always adds


def test_mlps_are_reallocated_over_depth():
    sizes = {"d_model": 48, "n_blocks": 5, "n_heads": 2}
    cfg = twoaxis.ModelConfig(depth="muddformer(reallocate_mlp=True)", **sizes)
    model = twoaxis.Decoder(cfg)
    widths = [block.cores[1].down.in_features for block in model.blocks]
    assert widths == [64, 96, 128, 160, 192]
    assert twoaxis.cost(cfg, 1, 4).parameters == sum(p.numel() for p in model.parameters())
    mean = twoaxis.ModelConfig(depth="muddformer", **sizes)
    assert twoaxis.cost(cfg, 1, 4).parameters == twoaxis.cost(mean, 1, 4).parameters


def test_is_no_instance_of_attention_over_depth():
    # equal sources x: softmax attention gives x whatever the token, MUDDFormer (sum_j A_j) x; and the order
    # of the older sources matters
    torch.manual_seed(0)
    stream, blocks = build("muddformer(ways=1)", 6, [["attention"]] * 3)
    randomised(stream, *(c for (c,) in blocks))
    mix = blocks[2][0].mix
    x = torch.randn(1, 2, 6, dtype=torch.float64)
    (z,) = mix((x, x, x), x)
    ratio = z / x
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))
    assert (ratio[0, 0, 0] - ratio[0, 1, 0]).abs() > 0.1
    a, b = torch.randn(2, 1, 2, 6, dtype=torch.float64)
    assert (mix((a, b, x), x)[0] - mix((b, a, x), x)[0]).abs().max() > 0.1


def test_warns_where_the_plain_form_diverged():
    with pytest.warns(UserWarning, match="pre_post_norm=True"):
        build("muddformer", 4, [["attention"]] * 24)
    build("muddformer(pre_post_norm=True)", 4, [["attention"]] * 24)  # no warning: they are errors here


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("ways=5", "allowed is 1 or 2 or 3 or 4"),
        ("pre_post_form='code'", "needs pre_post_norm=True"),
        ("dynamic=False, round64=False", "are for dynamic weights"),
    ],
)
def test_refuses(bad, why):
    with pytest.raises(twoaxis.InputError, match=why):
        twoaxis.parse_spec("depth", f"muddformer({bad})")


def test_refuses_blocks_without_separate_inputs():
    with pytest.raises(twoaxis.InputError, match="has no sublayer that takes them"):
        build("muddformer(ways=2)", 8, [["mlp"]] * 3)
    build("muddformer(ways=1)", 8, [["mlp"]] * 3)


def test_norm_and_connection_are_per_block():
    _, blocks = build("muddformer", 8, [["attention", "mlp"]] * 2)
    assert [isinstance(c.key_norm, nn.Module) for block in blocks for c in block] == [
        False,
        False,
        True,
        False,
    ]
