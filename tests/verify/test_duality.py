"""The duality's table: it passes, within its bounds, and every row can fail."""

import pytest
import torch

import twoaxis
from twoaxis.ops import reference
from twoaxis.verify import duality as module
from twoaxis.verify import identities
from twoaxis.verify.duality import duality
from twoaxis.verify.setting import BOUNDS, Row, Setting, difference


@pytest.mark.parametrize("dtype", BOUNDS)
def test_every_identity_holds(dtype):
    rows = duality(dtype)
    assert [row.name for row in rows if not row.passed] == []
    assert len({row.name for row in rows}) == len(rows) == 16
    assert all(row.bound == BOUNDS[dtype][0] for row in rows)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_float64_errors_are_at_most_1e_12_for_any_weights(seed):
    assert max(row.error for row in duality("float64", seed=seed)) <= 1e-12


def failing(**options) -> list[str]:
    return [row.name for row in duality("float64", **options) if not row.passed]


def test_a_window_one_too_wide_is_found(monkeypatch):
    def wide(q, k, v, window, **options):
        return reference.local_attention(q, k, v, None if window is None else window + 1, **options)

    monkeypatch.setattr(module, "local_attention", wide)
    assert failing() == [
        "depth read, K = 1 = ShortSWA on the transposed stack",
        "depth read, K = 3 = ShortSWA on the transposed stack",
    ]


@pytest.mark.parametrize("wrong", ["sdpa", "blocked"])
def test_one_wrong_backend_is_found(monkeypatch, wrong):
    def wide(q, k, v, window, backend="auto"):
        window = window + 1 if window is not None and backend == wrong else window
        return reference.local_attention(q, k, v, window)

    monkeypatch.setattr(module, "local_attention", wide)
    assert failing() == [f"depth read, K = {K} = ShortSWA on the transposed stack" for K in (1, 3)]


def test_another_scale_of_the_read_is_found(monkeypatch):
    def unscaled(query, sources, **options):
        return reference.depth_read(query, sources, **{**options, "scale": 1.0})

    monkeypatch.setattr(module, "depth_read", unscaled)
    assert failing() == [
        "depth read, K = 3 = ShortSWA on the transposed stack",
        "full depth read, K = l + 1 = attention on the transposed stack",
    ]


def test_other_weights_of_the_mixer_are_found(monkeypatch):
    original = module._mixer

    def off(model, window):
        mixer = original(model, window)
        mixer.qkv.weight[-1, 0] += 0.1
        return mixer

    monkeypatch.setattr(module, "_mixer", off)
    assert failing() == [
        f"depth_window, {k}: a model's reads = the short_swa mixer over its layers" for k in ("K = 3", "full")
    ]


def test_a_cache_that_forgets_is_found(monkeypatch):
    original = twoaxis.sequence.ShortSWA.new_slot

    def short(self, *args):
        slot = original(self, *args)
        slot.keep = max(slot.keep - 1, 0)
        return slot

    monkeypatch.setattr(twoaxis.sequence.ShortSWA, "new_slot", short)
    assert failing() == [
        "depth_window, K = 3: step = parallel along depth",
        "depth_window, full: step = parallel along depth",
        "step = parallel along the sequence: logits",
    ]


def test_keys_projected_wrongly_are_found(monkeypatch):
    read = twoaxis.depth.window_read.WindowRead
    project = read.project
    monkeypatch.setattr(
        read, "project", lambda self, state: (2 * project(self, state)[0], project(self, state)[1])
    )
    assert failing() == [f"depth_window, {k}: absorbed = explicit projections" for k in ("K = 3", "full")]


def test_a_delta_rewrite_of_another_strength_is_found(monkeypatch):
    def strong(state, direction, value, gate, eps):
        return reference.delta_rewrite(state, direction, value, 1.01 * gate, eps)

    monkeypatch.setattr(identities, "delta_rewrite", strong)
    assert [name.split(":")[0] for name in failing()] == ["DDL"] * 3


def test_a_gate_that_stops_at_1_is_found(monkeypatch):
    def timid(state, direction, value, gate, eps):
        return reference.delta_rewrite(state, direction, value, gate.clamp(max=1), eps)

    monkeypatch.setattr(identities, "delta_rewrite", timid)
    assert [name.split(":")[0] for name in failing()] == ["DDL"] * 3


def test_a_norm_that_sees_eps_is_found(monkeypatch):
    monkeypatch.setattr(
        identities,
        "replace",
        lambda cfg, **k: twoaxis.ModelConfig(**{**cfg.to_dict(), **k, "norm_eps": 1e-3}),
    )
    assert failing() == ["AttnRes with zero queries = the standard Transformer, eps = 0: logits"]


def test_random_models_have_no_parameter_at_its_start():
    cfg = twoaxis.ModelConfig(
        vocab_size=7, d_model=12, n_blocks=3, n_heads=2, depth="depth_window(output=True)"
    )
    fresh, filled = twoaxis.Decoder(cfg), Setting().decoder(cfg)
    assert not fresh.stream.window_read.value.weight.any()
    assert all((p != p.flatten()[0]).any() for p in filled.parameters())
    assert all(p.dtype == torch.float64 for p in filled.parameters())


def test_the_callers_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    duality()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_nan_fails():
    nan, one = torch.tensor([float("nan")]), torch.ones(1)
    error = difference([one, nan, one], [one, one, one])
    assert not Row("", error, 1.0).passed
    assert difference([torch.tensor([10.0, 5.0])], [torch.tensor([10.0, 4.0])]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "float16"}, "allowed is float64"), ({"device": "abacus"}, "device 'abacus' cannot be used")],
)
def test_refusals(options, message):
    with pytest.raises(twoaxis.InputError, match=message) as caught:
        duality(**options)
    assert "\n" not in str(caught.value)
