import math

import pytest

from twoaxis.train import TrainConfig
from twoaxis.train.schedule import lr_factor


def factors(**run):
    cfg = TrainConfig(**run)
    return [lr_factor(cfg, step) for step in range(1, cfg.steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_the_largest_rate(schedule):
    assert factors(schedule=schedule, steps=100, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_falls_from_one_to_the_ratio():
    got = factors(schedule="cosine", steps=13, warmup_steps=3, min_lr_ratio=0.2)
    assert got[7] == pytest.approx(0.6)  # half-way
    assert got[-1] == pytest.approx(0.2)
    assert got[3] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 10)) / 2)
    assert got[2:] == sorted(got[2:], reverse=True)


def test_wsd_is_stable_then_linear():
    got = factors(schedule="wsd", steps=20, warmup_steps=2, decay_fraction=0.25, min_lr_ratio=0.1)
    assert got[1:15] == [1.0] * 14
    assert got[15:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])


def test_constant_stays():
    assert factors(schedule="constant", steps=9, warmup_steps=1) == [1.0] * 9


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(
    "run", [{"steps": 1}, {"steps": 3, "warmup_steps": 5}, {"steps": 5, "warmup_steps": 5}], ids=str
)
def test_short_runs_have_rates_above_zero(schedule, run):
    for decay_fraction in (0.0, 1.0):
        got = factors(schedule=schedule, decay_fraction=decay_fraction, **run)
        assert all(0 < factor <= 1 for factor in got)
