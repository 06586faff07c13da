"""Verdicts from synthetic scores."""

from __future__ import annotations

import itertools
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from twoaxis.study.statistics import holm, paired, spread, verdicts

BASE = {0: 2.90, 1: 2.92, 2: 2.91, 3: 2.93}


def shifted(by: float, wobble: float = 0.001) -> dict[int, float]:
    return {seed: score + by + wobble * (-1) ** seed for seed, score in BASE.items()}


def calls(scores: dict[str, dict[int, float]], **options: object) -> dict[str, str]:
    return {v.row: v.call for v in verdicts(scores, "base", **options)}  # type: ignore[arg-type]


def test_paired_interval_and_p_are_students() -> None:
    d = [0.3, -0.1, 0.25, 0.2, 0.4]
    centre, low, high, p = paired(d)
    expected = stats.ttest_1samp(d, 0.0)
    interval = expected.confidence_interval(0.95)
    assert (centre, p) == pytest.approx((mean(d), expected.pvalue))
    assert (low, high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("d", "p"), [([0.0, 0.0, 0.0], 1.0), ([-0.5, -0.5, -0.5], 0.0)], ids=["equal", "constant"]
)
def test_paired_without_variance(d: list[float], p: float) -> None:
    assert paired(d) == (d[0], d[0], d[0], p)


def test_holm_is_the_published_procedure() -> None:
    # sorted 0.005, 0.01, 0.03, 0.04 -> 4, 3, 2, 1 times, made monotone
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_holm_follows_its_p_values(p_values: list[float], random: object) -> None:
    order = list(range(len(p_values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    adjusted = holm(p_values)
    assert holm([p_values[i] for i in order]) == [adjusted[i] for i in order]
    assert all(a >= p for a, p in zip(adjusted, p_values, strict=True))


def test_spread_is_the_sample_deviation_and_needs_two() -> None:
    assert spread([1.0]) is None
    assert spread([1.0, 2.0, 4.0]) == pytest.approx(stdev([1.0, 2.0, 4.0]))


@pytest.mark.parametrize(
    ("row", "call"),
    [
        pytest.param(shifted(-0.2), "better", id="far-below"),
        pytest.param(shifted(+0.2), "worse", id="far-above"),
        pytest.param(shifted(-0.2, wobble=0.3), "inside the noise", id="seeds-disagree"),
        pytest.param(shifted(-0.005, wobble=0.0001), "inside the noise", id="seeds-agree-inside-spread"),
    ],
)
def test_three_or_more_seeds_are_judged(row: dict[int, float], call: str) -> None:
    # pitfalls, "Evaluation, comparison, cost model": 3 or more seeds with spread
    (verdict,) = verdicts({"base": BASE, "row": row}, "base")
    assert verdict.call == call
    assert verdict.seeds == (0, 1, 2, 3)
    assert verdict.difference == pytest.approx(mean(row[s] - BASE[s] for s in BASE))
    assert call in verdict.words
    assert "95% interval" in verdict.words


@pytest.mark.parametrize(
    ("seeds", "words"), [([], "no finished seed"), ([0], "one seed"), ([0, 3], "two seeds")]
)
def test_fewer_seeds_are_never_ranked(seeds: list[int], words: str) -> None:
    row = {s: shifted(-1.0)[s] for s in seeds}
    (verdict,) = verdicts({"base": BASE, "row": row}, "base")
    assert verdict.call == "no ranking"
    assert verdict.words.startswith(f"no ranking: {words}")
    assert "better" not in verdict.words


def test_unmatched_rows_are_never_ranked() -> None:
    # pitfalls: different parameter counts -> refuses 'better' unless matched on a named budget
    scores = {"base": BASE, "large": shifted(-1.0), "equal": shifted(-1.0)}
    large, equal = verdicts(scores, "base", {"large": "budgets are unmatched (parameters +50.0%)"})
    assert (large.call, equal.call) == ("no ranking", "better")
    assert "parameters +50.0%" in large.words
    assert "better" not in large.words


def test_only_common_seeds_are_paired() -> None:
    row = {s: v for s, v in shifted(-0.2).items() if s != 1} | {9: 0.0}
    (verdict,) = verdicts({"base": BASE, "row": row}, "base")
    assert verdict.seeds == (0, 2, 3)
    assert verdict.difference == pytest.approx(mean(row[s] - BASE[s] for s in (0, 2, 3)))


def test_order_of_rows_and_seeds_changes_nothing() -> None:
    # pitfalls: methods A,B,C then C,B,A -> ranking does not depend on order
    rows = {"a": shifted(-0.2), "b": shifted(0.01, 0.05), "c": shifted(+0.3, 0.01), "base": BASE}
    expected = {v.row: v for v in verdicts(rows, "base")}
    for order in itertools.permutations(rows):
        permuted = {name: dict(reversed(rows[name].items())) for name in order}
        assert {v.row: v for v in verdicts(permuted, "base")} == expected


def test_many_comparisons_need_more_evidence() -> None:
    d = [-0.010, -0.030, -0.020, -0.024]  # p = 0.014 alone: not enough among eight
    base = dict.fromkeys(BASE, 2.9)  # no spread of its own
    own = {s: 2.9 + x for s, x in zip(BASE, d, strict=True)}
    assert paired(d)[3] < 0.05
    assert calls({"base": base, "row": own}) == {"row": "better"}
    crowd = {f"row{i}": own for i in range(8)}
    assert set(calls({"base": base, **crowd}).values()) == {"inside the noise"}


def test_a_baseline_without_runs_ranks_nothing() -> None:
    assert calls({"base": {}, "row": BASE}) == {"row": "no ranking"}


def test_seeds_that_change_nothing_count_as_one() -> None:
    base, own = dict.fromkeys(BASE, 2.9), dict.fromkeys(BASE, 2.8)
    (verdict,) = verdicts({"base": base, "row": own}, "base")
    assert verdict.call == "no ranking"
    assert "they are one run" in verdict.words
