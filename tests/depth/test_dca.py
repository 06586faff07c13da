"""DeepCrossAttention against the paper's equations written as a loop, and against the standard
Transformer."""

import pytest
import torch
from test_memory import saved_bytes

import twoaxis
from twoaxis.depth import build, named_tensors
from twoaxis.types import Context, Layout, Shape

B, T, D, L = 2, 3, 5, 6
SPECS = [
    "dca",
    "dca(k=1)",
    "dca(k=2)",
    "dca(k=4)",
    "dca(grn='v2')",
    "dca(k=1, grn='v1')",
    "dca(gate_norm=True)",
]
DROPS = ["dca(k=1, middle='drop')", "dca(k=2, middle='drop', gate_norm=True)"]
BLOCKS = {
    "attention, mlp": ["attention", "mlp"],
    "local to global": ["short_swa", "attention", "mlp"],
    "mlp first": ["mlp", "attention"],
    "one sublayer": ["attention"],
}


def sources_by_hand(history, cfg):
    """The branches h_0 .. h_{M-1} as the reader sees them (two published rules, one each)."""
    M = len(history)
    if cfg.k is None:
        return history
    if cfg.middle == "drop":
        return history if 2 * cfg.k > M else history[: cfg.k] + history[-cfg.k :]
    if cfg.k + 2 >= M:
        return history
    return [history[0], sum(history[1 : M - cfg.k]), *history[M - cfg.k :]]


def grn_by_hand(grn, sources):
    reads = []
    for o in range(len(grn.b)):
        g = 0
        for i, h in enumerate(sources):
            weight = grn.b[o, i]
            if grn.w is not None:
                scored = h
                if grn.gain is not None:
                    scored = h / (h.square().mean(-1, True) + grn.norm_eps).sqrt() * grn.gain
                weight = weight + torch.relu((scored @ grn.w[o])[..., None])
            g = g + weight * h
        reads.append(g)
    return reads


def core_of(matrices, takes_qkv):
    """A stand-in core: position-wise, with three inputs where the kind takes them."""
    q, k, v = matrices

    def core(reads, ctx):
        assert (reads.key is not None, reads.value is not None) == (takes_qkv, takes_qkv)
        y = reads.x @ q
        return torch.tanh(y + (reads.key @ k) * (reads.value @ v) if takes_qkv else y)

    return core


def network(spec, kinds, seed=0):
    """Stream, connections and cores, all random."""
    torch.manual_seed(seed)
    stream, blocks = build(spec, D, [kinds] * L)
    for module in [stream, *(c for block in blocks for c in block)]:
        module.double()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    first = next(i for i, kind in enumerate(kinds) if kind != "mlp")
    weights = torch.randn(L, len(kinds), 3, D, D, dtype=torch.float64) * 0.4
    cores = [[core_of(w, index == first) for index, w in enumerate(block)] for block in weights]
    return stream, blocks, cores


def run(stream, blocks, cores, x):
    """Every state between blocks, and the output."""
    states = [stream.open(x, Context())]
    for connections, block_cores in zip(blocks, cores, strict=True):
        state = states[-1]
        for connection, core in zip(connections, block_cores, strict=True):
            state = connection(state, core, Context())
        states.append(state)
    return states, stream.close(states[-1], Context())


@pytest.mark.parametrize("kinds", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("spec", [*SPECS, *DROPS])
def test_the_network_equals_the_equations(spec, kinds):
    """Stands in for vectors of the pooled form, of which there are none."""
    stream, blocks, cores = network(spec, kinds)
    x = torch.randn(B, T, D, dtype=torch.float64)
    states, y = run(stream, blocks, cores, x)

    cfg, history = twoaxis.parse_spec("depth", spec), [x]
    for connections, block_cores in zip(blocks, cores, strict=True):
        query, key, value = grn_by_hand(connections[0].grn, sources_by_hand(history, cfg))
        branch = torch.zeros_like(x)
        for connection, core in zip(connections, block_cores, strict=True):
            reads = twoaxis.Reads(connection.norm(query + branch))
            if connection.key_norm is not None:
                reads = twoaxis.Reads(
                    reads.x, connection.key_norm(key + branch), connection.value_norm(value + branch)
                )
            branch = branch + core(reads, Context())
        history.append(branch)
    (readout,) = grn_by_hand(stream.grn, sources_by_hand(history, cfg))
    torch.testing.assert_close(y, stream.norm(readout), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[-1]["sources"].sources[-1], history[-1], rtol=1e-12, atol=1e-12)


def model(spec, **fields):
    size = {"vocab_size": 7, "d_model": 12, "n_blocks": L, "n_heads": 2, "init_std": 0.3}
    torch.manual_seed(1)
    return twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, **size, **fields)).double()


def difference_from_standard(spec, sequence):
    ours, standard = model(spec, sequence=sequence), model("additive", sequence=sequence)
    weights = ours.state_dict()
    standard.load_state_dict({name: weights[name] for name in standard.state_dict()})
    tokens = torch.randint(7, (B, T))
    return float((ours(tokens) - standard(tokens)).detach().abs().max())


@pytest.mark.parametrize(
    "sequence",
    [["attention", "mlp"], ["short_swa(window=2)", "attention", "mlp"], ["mlp", "attention"], ["parallel"]],
    ids=["standard", "local to global", "mlp first", "parallel"],
)
@pytest.mark.parametrize("spec", SPECS)
def test_starts_as_the_standard_transformer(spec, sequence):
    assert difference_from_standard(spec, sequence) < 1e-12
    assert twoaxis.parse_spec("depth", spec).standard_start() == "exact"


def test_dropping_the_middle_does_not_start_as_the_standard_transformer():
    assert difference_from_standard("dca(k=1, middle='drop')", ["attention", "mlp"]) > 0.01
    assert twoaxis.parse_spec("depth", "dca(k=1, middle='drop')").standard_start() == "no"


def test_a_wide_k_is_full_memory():
    tokens = torch.randint(7, (B, T))
    full, wide = model("dca"), model(f"dca(k={L - 1})")  # the read-out has L + 1 = k + 2 sources
    wide.load_state_dict(full.state_dict())
    assert torch.equal(full(tokens), wide(tokens))


@pytest.mark.parametrize("form", ["v1", "v2"])
def test_forms_without_gates_are_special_cases_of_v3(form):
    """'v1 is v2 with b constant over d; v2 is v3 with w = 0'"""
    tokens = torch.randint(7, (B, T))
    gated, plain = model("dca"), model(f"dca(grn={form!r})")
    for name, b in plain.named_parameters():
        if name.endswith("grn.b"):
            torch.nn.init.normal_(b)
    weights = plain.state_dict()
    spread = {
        n: w[..., None].expand_as(gated.state_dict()[n]) if w.ndim == 2 and n.endswith("grn.b") else w
        for n, w in weights.items()
    }
    gated.load_state_dict(spread, strict=False)
    torch.testing.assert_close(gated(tokens), plain(tokens), rtol=1e-12, atol=1e-12)


def test_gates_move_from_their_start():
    """At w = 0 the score is exactly 0; a relu with slope 0 there would leave every gate at 0 for ever."""
    ours = model("dca")
    tokens = torch.randint(7, (B, T))
    ours.loss(tokens, tokens).backward()
    gates = [p for name, p in ours.named_parameters() if name.endswith("grn.w")]
    assert len(gates) == L + 1
    assert all((p.grad != 0).any() for p in gates)


@pytest.mark.parametrize("spec", [*SPECS, *DROPS])
def test_parameters_and_boundaries_are_as_costed(spec):
    stream, blocks = build(spec, D, [["attention", "mlp"]] * L)
    layout = Layout(d_model=D, blocks=(("attention", "mlp"),) * L)
    cost = twoaxis.parse_spec("depth", spec).cost(Shape(layout=layout, batch_size=B, seq_len=T))
    modules = [stream, *(c for block in blocks for c in block)]
    assert cost.parameters == sum(p.numel() for m in modules for p in m.parameters())
    specs = [stream.state_spec(depth, B, T) for depth in range(L + 1)]
    assert cost.boundary_bytes == {"full": max(sum(t.nbytes for t in s.values()) for s in specs)}


def test_extra_parameters_in_closed_form():
    layout = Layout(d_model=D, blocks=(("attention", "mlp"),) * L)
    shape = Shape(layout=layout, batch_size=1, seq_len=1)
    ours, plain = (twoaxis.parse_spec("depth", s).cost(shape).parameters for s in ("dca", "additive"))
    norms = 2 * D * L  # of keys and values
    assert ours - plain == 3 * D * L * (L + 3) // 2 + D * (L + 2) + norms  # as docs/methods/dca.md says


def test_a_name_is_one_value_at_every_depth():
    """'the names and meaning of each exported state are fixed' (pitfalls, depth states)"""
    stream, blocks, cores = network("dca(k=2)", ["attention", "mlp"])
    states, _ = run(stream, blocks, cores, torch.randn(B, T, D, dtype=torch.float64))
    values = {}
    for depth, state in enumerate(states):
        found = named_tensors(state)
        assert list(found) == list(stream.state_spec(depth, B, T))
        for name, tensor in found.items():
            assert torch.equal(values.setdefault(name, tensor), tensor)
    assert list(found) == ["sources.source.0", "sources.source.5", "sources.source.6", f"middle.{L - 2}"]
    by_hand = sum(values[f"sources.source.{i}"] for i in range(1, L - 1))
    torch.testing.assert_close(values[f"middle.{L - 2}"], by_hand, rtol=0, atol=1e-13)


@pytest.mark.parametrize("spec", ["dca", "dca(k=2)", "dca(gate_norm=True)"])
def test_saved_bytes_grow_linearly_with_depth(spec):
    few, some, many = (saved_bytes(spec, n) for n in (6, 12, 24))
    assert (many - some) / 12 == pytest.approx((some - few) / 6, rel=0.15)


def test_only_gates_and_static_weights_are_added():
    rules = model("dca(gate_norm=True)").param_rules()
    depth = {name for name in rules if ".grn." in name}
    assert {name.rsplit(".", 1)[-1] for name in depth} == {"b", "w", "gain"}
    assert not any(rules[name].decay for name in depth)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dca(k=0)", "allowed is 1 or more"),
        ("dca(k=True)", "allowed is"),
        ("dca(middle='drop')", "give k"),
        ("dca(grn='v4')", "'v1' or 'v2' or 'v3'"),
        ("dca(grn='v2', gate_norm=True)", "has no gate"),
        ("dca(window=3)", "no option 'window'"),
    ],
)
def test_refusals(spec, message):
    with pytest.raises(twoaxis.InputError, match=message):
        twoaxis.parse_spec("depth", spec)


def test_a_block_without_separate_inputs_is_refused():
    with pytest.raises(twoaxis.InputError, match=r"block 1 \['mlp'\] has no sublayer"):
        build("dca", D, [["attention", "mlp"], ["mlp"]])
