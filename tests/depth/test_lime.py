"""LIMe: routed keys and values inside attention, the dynamic form over streams, and what the state keeps."""

import pytest
import torch
from torch import Tensor, nn

import twoaxis
from twoaxis import spec as specs
from twoaxis.depth import LIMe, build, named_tensors
from twoaxis.depth.lime import Router, routers
from twoaxis.ops.reference import rms
from twoaxis.sequence import Attention
from twoaxis.types import Context, Layout, Shape

CTX = Context()


class Noted(Attention):
    """Attention that remembers the keys and values it attends to."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.attended = (k, v)
        return super().attend(q, k, v, ctx)


def core(layout, block, text="attention"):
    return Noted(specs.parse_spec("sequence", text), layout, block).double()


def test_keys_and_values_are_routed_by_one_matrix():
    torch.manual_seed(0)
    L, heads, d = 3, 2, 16
    stream, blocks = build("lime", d, [["attention"]] * L, n_heads=4, n_kv_heads=heads)
    stream.double()
    state = stream.open(torch.randn(2, 5, d, dtype=torch.float64), CTX)
    raw: list[Tensor] = []
    for n, (connection,) in enumerate(blocks):
        connection.double()
        noted = core(connection.layout, n)
        _, k, v = noted.project(connection.read(state, CTX)[0])
        raw += [torch.cat((k[:, :, g], v[:, :, g]), -1) for g in range(heads)]
        state = connection(state, noted, CTX)
        expected = raw[-heads:]
        if n:
            R = connection.routers[str(n)].weight
            assert R.shape == (heads, (n + 1) * heads)
            expected = [sum(w * row for w, row in zip(weights, raw, strict=True)) for weights in R]
        found = torch.cat(noted.attended, -1).unbind(-2)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert list(named_tensors(state)) == ["stream"]  # no later attention reads them


def test_attentions_inside_parallel_are_layers_of_their_own():
    blocks = [["parallel(attention, short_swa(window=3))", "mlp"]] * 2
    layout = Layout(d_model=12, blocks=tuple(map(tuple, blocks)), n_heads=2, n_kv_heads=2)
    assert [(n, older) for n, _, older, _ in routers(layout)] == [(0, 0), (1, 2), (2, 4), (3, 6)]
    _, connections = build("lime", 12, blocks, n_heads=2, n_kv_heads=2)
    assert list(connections[0][0].routers) == ["1"]
    assert list(connections[1][0].routers) == ["2", "3"]


def test_older_columns_start_random_or_at_zero():
    torch.manual_seed(0)
    for start, reach in (("paper", (3 / 500) ** 0.5), ("standard", 0.0)):
        router = Router(LIMe.Config(start=start), heads=20, older=480)
        older, own = router.weight.detach().split([480, 20], 1)
        assert torch.equal(own, torch.eye(20))
        assert older.abs().max() <= reach
        assert older.std().item() == pytest.approx(reach / 3**0.5, rel=0.02)


def test_routers_learn_faster_and_do_not_decay():
    model = twoaxis.Decoder(twoaxis.ModelConfig(d_model=12, n_blocks=3, n_heads=2, depth="lime"))
    rules = {n: r for n, r in model.param_rules().items() if "routers" in n}
    assert len(rules) == 2
    assert {(r.decay, r.lr_scale) for r in rules.values()} == {(False, 10.0)}


def test_counts_of_the_paper():
    # H_k^2 (L(L+1)/2 - 1) weights, the state at the boundary is the stream and all keys and values so far
    layout = Layout(d_model=32, blocks=(("attention", "mlp"),) * 8, n_heads=8, n_kv_heads=2)
    cost = twoaxis.parse_spec("depth", "lime").cost(Shape(layout=layout, batch_size=1, seq_len=1))
    assert cost.parameters - 17 * 32 == 4 * (36 - 1)
    assert cost.boundary_bytes == {"full": 4 * (32 + 7 * 2 * 2 * 4)}


@pytest.mark.parametrize("gate", ["softmax", "relu"])
@pytest.mark.parametrize("views", [1, 3])
def test_dynamic_form_mixes_the_streams_before_every_sublayer(views, gate):
    torch.manual_seed(0)
    L, d, eps = 3, 6, 1e-3
    spec = f"lime(kind='dynamic', views={views}, gate={gate!r})"
    stream, blocks = build(spec, d, [["attention", "mlp"]] * L, norm_eps=eps)
    stream.double()
    x = torch.randn(2, 3, d, dtype=torch.float64)
    state, streams = stream.open(x, CTX), []
    for connection in (c for connections in blocks for c in connections):
        connection.double()
        connection.norm = nn.Identity()
        if connection.key_norm is not None:
            connection.key_norm = connection.value_norm = nn.Identity()
        streams.append(x)
        reads, carry = connection.read(state, CTX)
        given = [t for t in (reads.x, reads.key, reads.value) if t is not None]
        assert len(given) == (views if connection.index == 0 else 1)
        if connection.mix is None:
            expected = [x] * len(given)
        else:
            scores = connection.mix.score(rms(x, eps)).view(2, 3, len(given), len(streams))
            weights = scores.softmax(-1) if gate == "softmax" else scores.relu()
            expected = [
                sum(weights[:, :, v, m, None] * h for m, h in enumerate(streams)) for v in range(len(given))
            ]
        for one, other in zip(given, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        y = torch.randn_like(x)
        state, x = connection.write(state, carry, y, CTX), x + y  # the skip is the unmixed stream
        torch.testing.assert_close(state["stream"], x, rtol=0, atol=1e-12)
    assert list(named_tensors(state)) == ["stream"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("views=3", "views and gate are for kind='dynamic'"),
        ("gate='relu'", "views and gate are for kind='dynamic'"),
        ("kind='dynamic', start='standard'", "it has no such start"),
        ("views=2", "allowed is 1 or 3"),
    ],
)
def test_refuses_options(bad, why):
    with pytest.raises(twoaxis.InputError, match=why):
        twoaxis.parse_spec("depth", f"lime({bad})")


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([["mlp"]] * 2, "no block has one"),
        ([["attention"], ["attention(n_heads=1)"]], "heads of one width"),
    ],
)
def test_refuses_blocks(blocks, why):
    with pytest.raises(twoaxis.InputError, match=why):
        build("lime", 12, blocks, n_heads=2, n_kv_heads=2)
