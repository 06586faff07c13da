"""Canon layers: the equation, the four points of a block, presets over a block, equal parameters."""

import pytest
import torch
import torch.nn.functional as F
from cores import at_once, build, inputs, layout

import twoaxis
from twoaxis import InputError, spec
from twoaxis.cost import match_mlp
from twoaxis.sequence import Canon, carried_out
from twoaxis.types import Context, Reads, Shape

SIZES = {"vocab_size": 11, "d_model": 24, "n_heads": 2, "n_blocks": 2}


def block(*specs):
    return [c.spec() for c in carried_out([spec.parse_spec("sequence", s) for s in specs])]


def model(*sequence, **fields):
    torch.manual_seed(0)
    return twoaxis.Decoder(twoaxis.ModelConfig(**{**SIZES, **fields}, sequence=list(sequence)))


@pytest.mark.parametrize("kernel", [1, 2, 4, 7])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_it_is_its_equation(kernel, residual, activation):
    core, x = build(f"canon(kernel={kernel}, residual={residual}, activation={activation!r})"), inputs(2)
    y = torch.zeros_like(x)
    for t in range(12):
        for j in range(min(kernel, t + 1)):
            y[:, t] += core.conv.weight[:, kernel - 1 - j] * x[:, t - j]
    y = F.silu(y) if activation == "silu" else y
    torch.testing.assert_close(at_once(core, x), x + y if residual else y, rtol=0, atol=1e-12)


def test_start():
    """At random as the authors', U(-1/2, 1/2) for four taps; or zero taps: the identity."""
    random = Canon(spec.parse_spec("sequence", "canon"), layout(d_model=4000), 0).conv.weight
    assert 0.49 < random.abs().max() <= 0.5
    assert abs(random.std() - 0.289) < 0.005
    zero = Canon(spec.parse_spec("sequence", "canon(start='zero')"), layout(), 0).double()
    assert at_once(zero, inputs(2)).equal(inputs(2))


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["canon(set='ABCD')"], ["attention(input='canon', qkv='canon')", "mlp(input='canon', hidden_input='canon')"]),
        (["canon(set='CA', kernel=3)"], ["attention(input='canon(kernel=3)')", "mlp(input='canon(kernel=3)')"]),
        (
            ["short_swa", "attention(window=9)", "canon(set='BD')", "mlp(hidden=5)"],
            ["short_swa", "attention(window=9, qkv='canon')", "mlp(hidden=5, hidden_input='canon')"],
        ),
        (["canon(set='A')", "canon(set='B', kernel=2)"], ["attention(input='canon', qkv='canon(kernel=2)')", "mlp"]),
        (["canon", "attention", "mlp"], ["canon", "attention", "mlp"]),
        (["local_to_global"], ["short_swa", "attention", "mlp"]),
        (["local_to_global(mixer='canon')"], ["canon", "attention", "mlp"]),
        (["local_to_global(mixer='short_conv(kernel=3)')", "attention(window=9)", "mlp"],
         ["short_conv(kernel=3)", "attention(window=9)", "mlp"]),
        (["local_to_global", "canon(set='AC')"], ["short_swa", "attention(input='canon')", "mlp(input='canon')"]),
        (["attention", "mlp"], ["attention", "mlp"]),
    ],
    ids=str,
)  # fmt: skip
def test_presets_over_a_block(given, made):
    made = [spec.parse_spec("sequence", s).spec() for s in made]
    assert block(*given) == made
    cfg = twoaxis.ModelConfig(**SIZES, sequence=given)
    assert cfg.sequence == [spec.parse_spec("sequence", s).spec() for s in given]  # kept as it was given
    assert cfg.layout().blocks == (tuple(made),) * 2
    assert twoaxis.ModelConfig(**SIZES, sequence=[given, given]).layout().blocks == (tuple(made),) * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["canon(set='ABCE')"], "any of the points A, B, C, D once"),
        (["canon(set='AA')"], "any of the points A, B, C, D once"),
        (["canon(set='')"], "any of the points A, B, C, D once"),
        (["canon(set='AC')", "mlp"], "point A needs an 'attention' in the block"),
        (["canon(set='D')", "attention"], "point D needs an 'mlp' in the block"),
        (["canon(set='B')", "attention(qkv='token_shift')"], "has a mixer at point B; leave one out"),
        (["local_to_global(mixer='canon(set=\\'A\\')')"], "a preset makes a whole block"),
        (["local_to_global(mixer='local_to_global')"], "a preset makes a whole block"),
        (["local_to_global(mixer='nothing')"], "sequence method 'nothing' is unknown"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_presets_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        twoaxis.ModelConfig(**SIZES, sequence=given)


def test_parameters_are_those_of_the_authors_table():
    """Per layer K (2 d + (Hq + 2 Hkv) D + 2 d_ff)."""
    core = ["attention(n_heads=4, n_kv_heads=2)", "mlp(hidden=40)"]
    plain, canon = model(*core), model("canon(set='ABCD')", *core)
    count = [sum(p.numel() for p in m.parameters()) for m in (plain, canon)]
    assert count[1] - count[0] == 2 * 4 * (2 * 24 + (4 + 2 * 2) * 6 + 2 * 40)


def test_points_are_where_the_paper_puts_them():
    """h = canonA(N1 x); q, k, v = canonB(norm(W h)); u = x + W_o Attn; m = canonC(N2 u); canonD(W_g m, W_u m)."""
    attention = build("attention(input='canon', qkv='canon', qk_norm='full', rope_dims=4)")
    mlp, x = build("mlp(hidden=5, input='canon', hidden_input='canon')"), inputs(2)
    h = at_once(attention.mixers["input"], x)
    q, k, v = (h @ w.T for w in attention.qkv.weight.split(24))
    q, k = attention.q_norm(q), attention.k_norm(k)
    q, k, v = at_once(attention.mixers["qkv"], torch.cat((q, k, v), -1)).split(24, -1)
    plain = build("attention(rope_dims=4)")
    with torch.no_grad():
        plain.out.weight.copy_(attention.out.weight)
    expected = plain.attend(*(p.unflatten(-1, (2, 12)) for p in (q, k, v)), Context())
    torch.testing.assert_close(at_once(attention, x), expected, rtol=0, atol=1e-11)
    gate, up = at_once(mlp.mixers["hidden_input"], mlp.up(at_once(mlp.mixers["input"], x))).chunk(2, -1)
    torch.testing.assert_close(at_once(mlp, x), mlp.down(F.silu(gate) * up), rtol=0, atol=1e-11)


def test_zero_taps_are_the_standard_transformer():
    tokens = torch.randint(11, (2, 9))
    standard, canon = model("attention", "mlp"), model("canon(set='ABCD', start='zero')")
    standard.load_state_dict(canon.state_dict(), strict=False)
    assert canon(tokens).equal(standard(tokens))
    assert not model("canon(set='ABCD')")(tokens).equal(standard(tokens))


def test_full_norm_of_queries_and_keys():
    core, x = build("attention(n_heads=4, n_kv_heads=2, qk_norm='full')"), inputs()
    q, k, _ = core.project(Reads(x))
    for part, norm in ((q, core.q_norm), (k, core.k_norm)):
        assert norm.weight.shape == (part.shape[2] * part.shape[3],)
        flat = part.flatten(2) / norm.weight
        torch.testing.assert_close(flat.square().mean(-1), torch.ones(1, 12).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("r", [0, 2, 6, 12])
def test_partial_rotation_turns_the_first_features(r):
    core, x = build(f"attention(rope_dims={r})"), inputs()
    shifted = core(Reads(x), Context(positions=torch.arange(0, 24, 2)))
    assert torch.equal(shifted, at_once(core, x)) == (r == 0)
    with torch.no_grad():
        for heads in core.qkv.weight[:48].view(4, 12, 24):
            heads[:r] = 0  # what is turned is zero, and the rest does not know positions
    torch.testing.assert_close(core(Reads(x), Context(positions=torch.arange(0, 24, 2))), at_once(core, x))


@pytest.mark.parametrize("budget", ["parameters", "flops"])
def test_local_mixers_at_equal_cost(budget):
    """Algorithm 1, and the same with ShortConv and Canon in the place of ShortSWA, brought to one count."""
    local = ["short_swa(window=16)", "short_conv", "short_conv(form='lfm2')", "canon", "token_shift"]
    configs = [
        twoaxis.ModelConfig(**{**SIZES, "d_model": 256}, sequence=[f'local_to_global(mixer="{m}")'])
        for m in local
    ]
    counts = [getattr(twoaxis.cost(c, 1, 32), budget) for c in configs]
    matched = [match_mlp(c, budget, counts[0], 1, 32) for c in configs]
    after = [getattr(twoaxis.cost(c, 1, 32), budget) for c in matched]
    assert max(counts) / min(counts) > 1.1
    assert all(abs(n / counts[0] - 1) < 0.01 for n in after)
    for mixer, cfg in zip(local, matched, strict=True):
        assert cfg.layout().blocks[0][:2] == (spec.parse_spec("sequence", mixer).spec(), "attention")


@pytest.mark.parametrize("name", ["canon(set='ABCD')", "local_to_global(mixer='canon')"])
def test_a_preset_costs_what_its_block_costs(name):
    cfg = spec.parse_spec("sequence", name)
    shape = Shape(layout=layout(), batch_size=2, seq_len=9)
    parts = [c.cost(shape) for c in carried_out([cfg])]
    assert cfg.cost(shape) == sum(parts[1:], start=parts[0])
