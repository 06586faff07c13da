"""When two rows were given the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from twoaxis.model import Decoder, ModelConfig
from twoaxis.study.budgets import budgets, unmatched, widened_baselines
from twoaxis.train import TrainConfig

BASE = TrainConfig(model=ModelConfig(d_model=64, n_blocks=2, n_heads=2), seq_len=32, batch_size=2, steps=5)
WIDE = dataclasses.replace(
    BASE, model=dataclasses.replace(BASE.model, sequence=["attention", "mlp(hidden=256)"])
)
LOCAL = ["short_swa(window=4)", "attention", "mlp"]


def test_budgets_are_counts_of_the_run() -> None:
    found = budgets(dataclasses.replace(BASE, accumulation=3))
    assert found["parameters"] == sum(p.numel() for p in Decoder(BASE.model).parameters())
    assert found["tokens"] == 5 * 3 * 2 * 32
    assert found["flops_per_token"] == budgets(BASE)["flops_per_token"] > 6 * 0.5 * found["parameters"]


def test_equal_runs_are_matched_whatever_the_seed() -> None:
    assert unmatched(dataclasses.replace(BASE, seed=4), BASE, "width") is None


@pytest.mark.parametrize("match", ["width", "parameters", "flops"])
def test_another_size_is_unmatched(match: Any) -> None:
    reason = unmatched(WIDE, BASE, match)
    assert reason is not None
    named = {"parameters": ["parameters +"], "flops": ["FLOPs per token +"]}
    assert all(word in reason for word in named.get(match, ["parameters +", "FLOPs per token +"]))


def test_the_named_budget_is_the_one_that_counts() -> None:
    # attention over a window: the same parameters, fewer FLOPs
    long = dataclasses.replace(BASE, seq_len=512)
    windowed = dataclasses.replace(
        long, model=dataclasses.replace(BASE.model, sequence=["attention(window=4)", "mlp"])
    )
    assert unmatched(windowed, long, "parameters") is None
    for match in ("flops", "width"):
        assert "FLOPs per token -" in str(unmatched(windowed, long, match))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"lr": 1e-4}, {"steps": 6}, {"batch_size": 3}, {"data": "pydocs"}, {"seq_len": 33}, {"schedule": "wsd"}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("match", ["width", "parameters", "flops"])
def test_other_settings_are_unmatched(change: dict[str, Any], match: Any) -> None:
    # pitfalls: tokens seen, data order or learning rate differ -> refuses 'better'
    name, value = next(iter(change.items()))
    reason = unmatched(dataclasses.replace(BASE, **change), BASE, match)
    assert f"{name}={value!r} against" in str(reason)


def test_how_a_run_is_executed_is_no_budget() -> None:
    assert unmatched(dataclasses.replace(BASE, compile=True, checkpoint_every=2), BASE, "width") is None


def test_a_widened_baseline_is_offered_and_meets_the_row() -> None:
    # pitfalls: offers a widened baseline as control
    row = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, sequence=LOCAL))
    offers = widened_baselines(row, BASE)
    assert [o.rpartition(" has its ")[2] for o in offers] == ["parameters", "FLOPs per token"]
    for offer, name in zip(offers, ("parameters", "flops_per_token"), strict=True):
        block = offer.split('--sequence "')[1].split('"')[0].split(",")
        control = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, sequence=block))
        assert budgets(control)[name] == pytest.approx(budgets(row)[name], rel=0.03)
        assert budgets(BASE)[name] < 0.9 * budgets(row)[name]
    assert widened_baselines(BASE, BASE) == []
