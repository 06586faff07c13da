"""What cores compute, and that they behave as modules."""

import pytest
import torch
import torch.nn.functional as F
from cores import WINDOWED, at_once, build, in_steps, inputs, layout

import twoaxis
from twoaxis import spec
from twoaxis.norm import RMSNorm
from twoaxis.types import Context, Reads

every_core = pytest.mark.parametrize("core", WINDOWED)


def test_swiglu_is_its_equation():
    core, x = build("mlp(hidden=5)"), inputs(2)
    gate, up = core.up.weight[:5], core.up.weight[5:]
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ core.down.weight.T
    torch.testing.assert_close(at_once(core, x), expected)


def test_gelu_is_its_equation():
    core, x = build("mlp(hidden=5, act='gelu')"), inputs(2)
    u = x @ core.up.weight.T
    expected = (u * (1 + torch.erf(u / 2**0.5)) / 2) @ core.down.weight.T
    torch.testing.assert_close(at_once(core, x), expected)


@pytest.mark.parametrize(
    ("text", "d_model", "hidden"),
    [("mlp", 512, 1368), ("mlp", 128, 344), ("mlp", 24, 64), ("mlp", 1, 8), ("mlp(act='gelu')", 24, 96)],
)
def test_default_hidden_width(text, d_model, hidden):
    """8d/3 to the nearest multiple of 8, 4d for gelu."""
    assert spec.parse_spec("sequence", text).hidden_width(layout(d_model=d_model)) == hidden


@pytest.mark.parametrize(
    "parts", [("attention", "mlp"), ("short_swa(window=2)", "mlp", "parallel(mlp, mlp)")], ids=str
)
def test_parallel_adds_its_cores(parts):
    core, x = build(f"parallel({', '.join(parts)})"), inputs(2)
    torch.testing.assert_close(at_once(core, x), sum(part(Reads(x), Context()) for part in core.cores))


def test_parallel_is_attention_and_mlp_by_default():
    config = spec.parse_spec("sequence", "parallel")
    assert [p.spec() for p in config.parts()] == ["attention", "mlp"]
    assert config.kind == "parallel(attention, mlp)"


@pytest.mark.parametrize("given", [(), ("key",), ("value",), ("key", "value")], ids=str)
@pytest.mark.parametrize(
    "core", ["attention(n_heads=4, n_kv_heads=2)", "short_swa(window=3)", "parallel(attention, mlp)"]
)
def test_keys_and_values_may_have_inputs_of_their_own(core, given):
    module, x = build(core), inputs()
    others = {name: inputs() * (i + 2) for i, name in enumerate(given)}
    attention = module.cores[0] if "parallel" in core else module
    sizes = [n * attention.width for n in (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads)]
    for part, weight, source in zip(
        attention.project(Reads(x, **others)),
        attention.qkv.weight.split(sizes),
        (x, others.get("key", x), others.get("value", x)),
        strict=True,
    ):
        torch.testing.assert_close(part.flatten(2), source @ weight.T)
    same = module(Reads(x, key=x, value=x), Context())
    torch.testing.assert_close(same, at_once(module, x), rtol=0, atol=1e-12)
    assert module.accepts_qkv
    if given:
        assert not torch.allclose(module(Reads(x, **others), Context()), same)


def test_only_attention_takes_separate_inputs():
    takes = {name: spec.parse_spec("sequence", name).accepts_qkv for name in WINDOWED}
    assert {name.split("(")[0] for name, yes in takes.items() if yes} == {
        "attention",
        "short_swa",
        "parallel",
    }
    assert {name.split("(")[0] for name, yes in takes.items() if not yes}.isdisjoint(
        {"attention", "short_swa"}
    )
    mixed = spec.parse_spec("sequence", "attention(input='canon')")
    assert not mixed.accepts_qkv  # one input is mixed and remembered


@pytest.mark.parametrize("core", ["attention", "short_swa(window=3)"])
def test_qk_norm(core):
    name = core.split("(")[0]
    module, x = build(core, qk_norm=True, norm_eps=0.0), inputs()
    q, k, v = module.project(Reads(x))
    for part, norm in ((q, module.q_norm), (k, module.k_norm)):
        assert isinstance(norm, RMSNorm)
        torch.testing.assert_close((part / norm.weight).square().mean(-1), torch.ones(1, 12, 2).double())
    assert v.square().mean(-1).std() > 0.1  # values are left alone
    off = build(f"{name}(qk_norm=False)", qk_norm=True)
    assert isinstance(off.q_norm, torch.nn.Identity)
    assert isinstance(build(f"{name}(qk_norm=True)").k_norm, RMSNorm)


def test_start_zero_writes_nothing_at_first():
    sequence = ["short_swa(window=3, start='zero')", "attention", "mlp"]
    model = twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=7, d_model=8, n_heads=2, sequence=sequence))
    tokens = torch.randint(7, (2, 9))
    core = model.blocks[0].cores[0]
    x = torch.randn(2, 9, 8)
    assert not core(Reads(x), Context()).any()
    model.loss(tokens, tokens).backward()
    assert core.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)], ids=str)
@every_core
def test_empty_inputs(core, shape):
    # pitfall (Batches, heads): B=0, T=4; B=2, T=0: empty outputs, right shape and dtype, caches unchanged
    module, x = build(core), torch.zeros(*shape, 24, dtype=torch.float64)
    for y in (at_once(module, x), in_steps(module, x, [shape[1]])):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
    if shape == (2, 0):
        full = inputs(2)
        torch.testing.assert_close(
            in_steps(module, full, [5, 0, 7]), at_once(module, full), rtol=0, atol=1e-12
        )


@every_core
def test_views_equal_copies(core):
    # pitfall (Batches, heads): inputs as transposed, strided, expanded and sliced views
    module, x = build(core), inputs(2)
    views = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": x.repeat_interleave(2, 1)[:, ::2],
        "sliced": torch.cat((x, x), -1)[..., :24],
        "expanded": x[:1].expand(2, -1, -1),
    }
    for name, view in views.items():
        torch.testing.assert_close(at_once(module, view), at_once(module, view.contiguous()), msg=name)
        assert view.stride() != view.contiguous().stride() or name == "strided"


@every_core
def test_dropout_ends_with_evaluation_mode(core):
    # pitfall (Loss, optimiser, randomness): dropout 0.5, eval mode: identical; no_grad alone is not eval mode
    module, x = build(core, dropout=0.5), inputs()
    assert at_once(module, x).equal(at_once(module, x))
    assert at_once(module, x).equal(at_once(build(core), x))
    module.train()
    with torch.no_grad():
        assert not at_once(module, x).equal(at_once(module, x))


@pytest.mark.parametrize(
    "option", ["n_heads=1", "n_kv_heads=1", "qk_norm=True", "window=2", "hidden=9", "act='gelu'"]
)
def test_every_option_changes_the_output(option):
    # pitfall (Depth states): for each option, build twice with two values, same seed: outputs differ
    name = "mlp" if option.split("=")[0] in ("hidden", "act") else "attention"
    x = inputs()
    assert not torch.allclose(at_once(build(f"{name}({option})"), x), at_once(build(name), x))


@pytest.mark.parametrize("option", ["position='none'", "position='bias'", "sink=True", "window=3"])
def test_every_short_swa_option_changes_the_output(option):
    x = inputs()
    plain = build("short_swa(window=4)")
    other = build(f"short_swa(window=4, {option})" if "window" not in option else f"short_swa({option})")
    with torch.no_grad():
        other.qkv.weight.copy_(plain.qkv.weight)
        other.out.weight.copy_(plain.out.weight)
    assert not torch.allclose(at_once(other, x), at_once(plain, x))
