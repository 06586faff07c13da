"""Value residual: what an attention attends to in every form, and SVFormer's saving."""

import pytest
import torch
from torch import Tensor

import twoaxis
from twoaxis import spec as specs
from twoaxis.depth import build, named_tensors
from twoaxis.sequence import Attention
from twoaxis.types import Context, Layout, Reads, Shape

CTX = Context()
FORMS = ["identity", "constant", "sparse", "learnable", "learnable_plus", "gated"]


class Noted(Attention):
    """Attention that remembers the values it attends to."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.attended = v
        return super().attend(q, k, v, ctx)


def run(method, L=6, d=8, heads=2):
    """Every attention's own values, input, the values it attends to, and the connections; float64, random."""
    torch.manual_seed(0)
    stream, blocks = build(method, d, [["attention"]] * L, n_heads=4, n_kv_heads=heads)
    modules = [stream, *(c for (c,) in blocks)]
    for module in modules:
        module.double()
        for parameter in module.parameters():
            parameter.data = torch.randn_like(parameter)
    state, rows = stream.open(torch.randn(2, 3, d, dtype=torch.float64), CTX), []
    for n, (connection,) in enumerate(blocks):
        options = connection.cfg.core_options_at(connection.layout, n, 0)
        core = Noted(specs.parse_spec("sequence", "attention"), connection.layout, n, **options).double()
        reads, _ = connection.read(state, CTX)
        own = core.project(reads)[2]
        state = connection(state, core, CTX)
        rows.append((own, reads.x, core.attended))
    return rows, blocks, stream, state


@pytest.mark.parametrize("form", FORMS)
def test_values_are_mixed_with_the_first(form):
    rows, blocks, stream, state = run(f"value_residual(form={form!r})")
    first = rows[0][0]
    torch.testing.assert_close(rows[0][2], first, rtol=0, atol=0)
    for n, (own, x, attended) in enumerate(rows[1:], start=1):
        mix = dict(blocks[n][0].mixes.items()).get(str(n))
        if form == "sparse":
            expected = 5 * first + own if n >= 4 else own
        elif form == "gated":
            m = torch.sigmoid(x @ mix.weight.T + mix.bias)[..., None]
            expected = (1 - m) * first + m * own
        else:
            if form == "learnable_plus":
                plus = stream.shared
                weights = (plus.scale * plus.logits.softmax(0)[n - 1], mix.own)
            else:
                fixed = {"identity": (0.5, 0.5), "constant": (2, 1)}
                weights = mix.weights if form == "learnable" else fixed[form]
            expected = weights[0] * first + weights[1] * own
        torch.testing.assert_close(attended, expected, rtol=0, atol=1e-12)
    assert list(named_tensors(state)) == ["stream"]


def test_svformer_attends_to_the_first_values_and_owns_no_others():
    rows, *_ = run("svformer")
    for own, _, attended in rows[1:]:
        assert own is None
        assert torch.equal(attended, rows[0][0])


@pytest.mark.parametrize("blocks", [12, 1])
def test_svformer_saves_every_later_projection_of_values(blocks):
    sizes = {"d_model": 16, "n_blocks": blocks, "n_heads": 4, "n_kv_heads": 2}
    plain, saved = (twoaxis.ModelConfig(depth=depth, **sizes) for depth in ("additive", "svformer"))
    numbers = [sum(p.numel() for p in twoaxis.Decoder(cfg).parameters()) for cfg in (plain, saved)]
    assert numbers[0] - numbers[1] == (blocks - 1) * 16 * 2 * 4
    costs = [twoaxis.cost(cfg, 2, 5) for cfg in (plain, saved)]
    assert costs[0].parameters - costs[1].parameters == numbers[0] - numbers[1]
    assert costs[0].flops_forward - costs[1].flops_forward == 2 * (blocks - 1) * 16 * 2 * 4 * 10


def test_values_of_a_local_and_a_full_attention_are_shared():
    cfg = twoaxis.ModelConfig(
        d_model=16,
        n_blocks=2,
        n_heads=2,
        depth="svformer",
        sequence=["short_swa(window=3)", "attention", "mlp"],
    )
    model = twoaxis.Decoder(cfg)
    owned = [core.value_projection for block in model.blocks for core in block.cores[:2]]
    assert owned == [True, False, False, False]


@pytest.mark.parametrize(
    ("sequence", "keeps"),
    [
        (["attention", "mlp"], [1, 1, 1]),  # keys of three, and V_1
        (["attention(pattern='LS', window=3)", "mlp"], [1, 1, 1]),
        (["short_swa(window=3)", "attention", "mlp"], [1] * 6),
        (["parallel(attention, mlp)"], [1, 1, 1]),
        (
            ["parallel(attention, short_swa(window=4))"],
            [2, 2, 1, 1, 1, 1],
        ),  # two values in the first sublayer
        ([["attention"], ["attention(v='canon')"], ["attention"]], [1, 2, 1]),  # mixed values are one's own
        ([["attention"], ["short_swa(window=2, sink_tokens=1)"], ["attention"]], [1, 2, 1]),
        ([["attention"], ["attention(qkv='canon')"], ["mlp"]], [2, 2]),  # nobody shares
    ],
    ids=str,
)
def test_svformer_keeps_the_first_values_once(sequence, keeps):
    cfg = twoaxis.ModelConfig(
        vocab_size=11, d_model=12, n_blocks=3, n_heads=2, depth="svformer", sequence=sequence
    )
    model = twoaxis.Decoder(cfg).double()
    x, cache = torch.randint(11, (2, 11)), model.new_cache(2, max_length=11, max_rollback=2)
    slots = {n: list(s._data) for n, s in cache.slots.items() if "mixers" not in n}
    held = [len(set(names) & {"k", "v"}) for name, names in slots.items() if ".cores." in name]
    shared = [names for name, names in slots.items() if ".connections." in name]
    assert (held, shared) == (keeps, [["v"]] if 1 in keeps else [])
    parts = [model(part, cache=cache) for part in x[:, :9].split([5, 1, 3], 1)]
    cache.drop_last(2)
    parts = [torch.cat(parts, 1)[:, :7], *(model(part, cache=cache) for part in x[:, 7:].split([1, 3], 1))]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=0, atol=1e-12)
    cost = twoaxis.cost(cfg, 2, 11, dtype="float64", max_rollback=2)
    assert cost.decode_state_bytes == cache.nbytes


def test_svformer_needs_about_half_the_cache():
    sizes = {"d_model": 16, "n_blocks": 12, "n_heads": 4}
    plain, shared = (twoaxis.ModelConfig(depth=depth, **sizes) for depth in ("additive", "svformer"))
    made = [twoaxis.Decoder(cfg).new_cache(2, max_length=9).nbytes for cfg in (plain, shared)]
    assert made[1] * 24 == made[0] * 13
    assert [twoaxis.cost(cfg, 2, 9).decode_state_bytes for cfg in (plain, shared)] == made


@pytest.mark.parametrize(
    "sequence", [["attention", "mlp"], ["short_swa(window=3)", "attention", "mlp"]], ids=str
)
def test_svformer_at_fixed_shapes(sequence):
    cfg = twoaxis.ModelConfig(
        vocab_size=11, d_model=12, n_blocks=3, n_heads=2, depth="svformer", sequence=sequence
    )
    model, x = twoaxis.Decoder(cfg).double(), torch.randint(11, (2, 9))
    cache = model.new_cache(2, max_length=12, fixed_shapes=True)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("core", ["residual(short_swa)", "parallel(residual(short_swa), mlp)"])
def test_an_attention_that_svformer_does_not_reach_keeps_its_values(core):
    sizes = {"vocab_size": 7, "d_model": 8, "n_blocks": 2, "n_heads": 2}
    cfg = twoaxis.ModelConfig(depth="svformer", sequence=["attention", core], **sizes)
    model = twoaxis.Decoder(cfg)
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
    assert twoaxis.cost(cfg, 1, 3).parameters == sum(p.numel() for p in model.parameters())


def test_attention_without_values_needs_a_method_that_supplies_them():
    layout = Layout(d_model=8, blocks=(("attention",),), n_heads=2, n_kv_heads=2)
    core = Attention(specs.parse_spec("sequence", "attention"), layout, 0, value_projection=False)
    with pytest.raises(twoaxis.InputError, match="no W_v"):
        core(Reads(torch.randn(1, 2, 8)), CTX)


def test_starts():
    _, blocks = build("value_residual(form='learnable')", 8, [["attention"]] * 2)
    assert blocks[1][0].mixes["1"].weights.tolist() == [0.5, 0.5]
    stream, _ = build("value_residual(form='learnable_plus')", 8, [["attention"]] * 5)
    assert [stream.shared(torch.tensor([place])).item() for place in range(4)] == [
        1.0
    ] * 4  # s = 4 shared out
    model = twoaxis.Decoder(twoaxis.ModelConfig(d_model=8, n_heads=2, depth="value_residual(form='gated')"))
    assert not any(r.decay for n, r in model.param_rules().items() if "mixes" in n)


def test_the_papers_name_is_an_alias():
    config = twoaxis.parse_spec("depth", "resformer(form='constant')")
    assert config.spec() == "value_residual(form='constant')"
    assert "resformer" not in twoaxis.methods("depth")


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([["mlp"]] * 2, "no block has one"),
        ([["attention"], ["attention(n_kv_heads=1, n_heads=2)"]], "values of one shape"),
    ],
)
@pytest.mark.parametrize("method", ["value_residual", "svformer"])
def test_refuses_blocks(method, blocks, why):
    with pytest.raises(twoaxis.InputError, match=why):
        build(method, 12, blocks, n_heads=2, n_kv_heads=2)
    layout = Layout(d_model=12, blocks=tuple(map(tuple, blocks)), n_heads=2, n_kv_heads=2)
    config = twoaxis.parse_spec("depth", method)
    with pytest.raises(twoaxis.InputError, match=why):
        config.cost(Shape(layout=layout, batch_size=1, seq_len=1))


def test_refuses_a_start_that_a_form_has_not():
    with pytest.raises(twoaxis.InputError, match="has no such start"):
        twoaxis.parse_spec("depth", "value_residual(form='constant', start='standard')")
