"""MLP widths that bring a model to a budget."""

import pytest
from cases import METHODS, config

import twoaxis
from twoaxis.cost import budget_of, match_mlp, mismatch

B, T = 2, 33


def widths(cfg: twoaxis.ModelConfig) -> list[list[int]]:
    return [
        [c.hidden_width(cfg.layout()) for c in cores if hasattr(c, "hidden_width")]
        for cores in cfg.block_configs()
    ]


@pytest.mark.parametrize("budget", ["parameters", "flops"])
@pytest.mark.parametrize("depth", METHODS)
def test_methods_are_brought_to_the_standard_model(depth, budget):
    standard = config(d_model=64, n_heads=4)
    target = budget_of(standard, budget, B, T)
    matched = match_mlp(config(depth, d_model=64, n_heads=4), budget, target, B, T)
    step = budget_of(config(depth, sequence=["attention", "mlp(hidden=72)"], d_model=64), budget, B, T)
    step -= budget_of(config(depth, sequence=["attention", "mlp(hidden=64)"], d_model=64), budget, B, T)
    assert (
        abs(budget_of(matched, budget, B, T) - target) <= step / 2
    )  # half of what 8 channels more would add
    assert mismatch(matched, budget, target, B, T) == budget_of(matched, budget, B, T) / target - 1
    assert (matched.depth, matched.d_model) == (config(depth).depth, 64)


@pytest.mark.parametrize("budget", ["parameters", "flops"])
@pytest.mark.parametrize("hidden", [1, 5, 63, 64, 168, 4096])
def test_a_width_is_found_again(hidden, budget):
    wanted = config(sequence=["attention", f"mlp(hidden={hidden})"])
    target = budget_of(wanted, budget, B, T)
    assert match_mlp(config(), budget, target, B, T) == wanted
    assert mismatch(wanted, budget, target, B, T) == 0


def test_widths_are_multiples_of_eight_where_that_is_close():
    target = budget_of(config(sequence=["attention", "mlp(hidden=2051)"]), "parameters")
    matched = match_mlp(config(), "parameters", target)
    assert widths(matched) == [[2048]] * 3
    assert -0.005 < mismatch(matched, "parameters", target) < 0


def test_widths_move_in_finer_steps_where_eight_would_miss():
    target = budget_of(config(sequence=["attention", "mlp(hidden=171)"]), "parameters")
    matched = match_mlp(config(), "parameters", target)
    assert {width % 8 for (width,) in widths(matched)} == {4}  # 172; 168 misses by more than 0.5 %
    assert 0 < mismatch(matched, "parameters", target) < 0.005


def test_mlps_of_one_model_keep_their_proportions():
    cfg = config(
        sequence=[
            ["attention", "mlp(hidden=128)"],
            ["parallel(attention, mlp(hidden=64))"],
            ["mlp(hidden=128, act='gelu')"],
        ]
    )
    target = 2 * budget_of(cfg, "parameters")
    matched = match_mlp(cfg, "parameters", target)
    first, _, last = widths(matched)
    (inside,) = [p for p in matched.block_configs()[1][0].parts() if hasattr(p, "hidden")]
    assert first == last
    assert first[0] > 128
    assert abs(first[0] - 2 * inside.hidden) <= 8  # each is rounded by itself
    assert abs(mismatch(matched, "parameters", target)) < 0.02


@pytest.mark.parametrize(
    ("cfg", "budget", "target", "message"),
    [
        (config(sequence=["attention"]), "parameters", 10**6, "has no mlp to adjust"),
        (config(), "parameters", 10, "parameters=10 cannot be met: additive has"),
        (config(), "seconds", 10**6, "budget='seconds': allowed is 'parameters' or 'flops'"),
    ],
    ids=["no mlp", "too small", "unknown budget"],
)
def test_what_cannot_be_matched_is_refused(cfg, budget, target, message):
    with pytest.raises(twoaxis.InputError, match=message):
        match_mlp(cfg, budget, target)
