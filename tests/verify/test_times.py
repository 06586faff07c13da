"""Times beside counted work: the counted ratios, and that a time was taken; no time is asserted."""

import pytest

from twoaxis.verify.times import Timing, timings


def test_counted_ratios_are_those_of_the_work():
    rows = timings(rounds=1, shrink=8)
    mlp, attention, window = (row.counted for row in rows)
    assert mlp == pytest.approx(4, rel=0.15)  # d^2
    assert attention > window > 1.9
    assert all(row.measured > 0 for row in rows)


@pytest.mark.parametrize(("measured", "agrees"), [(4.0, True), (4.9, True), (5.1, False), (2.9, False)])
def test_a_quarter_is_the_bound(measured, agrees):
    assert Timing("x", 4.0, measured).agrees is agrees
