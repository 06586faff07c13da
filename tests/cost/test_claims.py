"""The claims in circulation: every verdict from a count made now, or said to be untested."""

import pytest

from twoaxis.cost.claims import claims


@pytest.fixture(scope="module")
def by_claim():
    return {claim.claim: claim for claim in claims()}


def test_every_verdict_rests_on_numbers_or_says_that_none_exist(by_claim):
    assert len(by_claim) == 13
    for claim in by_claim.values():
        assert claim.counted or claim.verdict == "untested", claim.claim


def test_memory_of_a_hybrid_grows_in_line_with_the_tokens(by_claim):
    found = by_claim["A hybrid's memory is quadratic above 2048 tokens."]
    assert found.verdict == "does not hold"
    assert found.counted["ratio"] == pytest.approx(2, rel=1e-3)


def test_no_depth_read_keeps_anything_between_tokens(by_claim):
    counted = by_claim["Cache layer outputs between tokens."].counted
    assert len(counted) == 7
    assert set(counted.values()) == {0}


def test_a_window_beside_attention_never_saves(by_claim):
    counted = by_claim["The sequence axis saves 20 to 30 % of training cost."].counted
    assert counted["beside_2048"] > 0
    assert counted["beside_32768"] > 0
    assert counted["instead_2048"] > -0.2 > counted["instead_32768"]


def test_a_depth_read_costs_a_token_the_same_in_any_context(by_claim):
    counted = by_claim["Adapt K to the remaining context."].counted
    assert counted["flops_512"] == counted["flops_4096"] > 0


def test_published_differences_are_mostly_larger_than_half_a_percent(by_claim):
    counted = by_claim["Methods differ by at most 0.5 %."].counted
    assert counted["larger"] > counted["results"] / 2
