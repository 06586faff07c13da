"""Schedules in time: the bubble's formula, uneven stages, links, what is live."""

import pytest

from twoaxis.cost.schedules import Action, actions, peak
from twoaxis.cost.simulate import simulate

SHAPES = [("gpipe", 1), ("1f1b", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize(("schedule", "virtual"), SHAPES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("rounds", [1, 3])
def test_equal_stages_wait_p_minus_1_of_v_m_plus_p_minus_1(schedule, virtual, ranks, rounds):
    n, m = ranks * virtual, ranks * rounds
    line = simulate(schedule, ranks, virtual, m, [1.0] * n, [2.0] * n)
    assert line.bubble == pytest.approx((ranks - 1) / (virtual * m + ranks - 1))
    assert line.seconds == pytest.approx(3 * (virtual * m + ranks - 1))
    assert all(busy == 3 * virtual * m for busy in line.busy)


@pytest.mark.parametrize(("schedule", "virtual"), SHAPES)
def test_every_pass_runs_once_after_what_it_needs(schedule, virtual):
    n, m = 4 * virtual, 8
    line = simulate(schedule, 4, virtual, m, [1.0] * n, [2.0] * n, [0.25] * (n - 1))
    assert sorted(a for order in line.orders for a in order) == sorted(
        Action(way, s, i) for way in "FB" for s in range(n) for i in range(m)
    )
    for (way, stage, micro), start in line.starts.items():
        if way == "F" and stage:
            assert start >= line.starts[Action("F", stage - 1, micro)] + 1.25
        if way == "B":
            before = Action("B", stage + 1, micro) if stage < n - 1 else Action("F", stage, micro)
            assert start >= line.starts[before] + (2.25 if stage < n - 1 else 1)


def test_what_is_live():
    # 1F1B holds P - s micro-batches, GPipe all of them
    assert simulate("1f1b", 4, 1, 8, [1.0] * 4, [1.0] * 4).live == (4, 3, 2, 1)
    assert simulate("gpipe", 4, 1, 8, [1.0] * 4, [1.0] * 4).live == (8, 8, 8, 8)
    assert simulate("interleaved", 4, 2, 8, [1.0] * 8, [1.0] * 8).live == (11, 9, 7, 5)
    assert simulate("1f1b", 1, 1, 8, [1.0], [1.0]).live == (1,)
    order = actions("interleaved", 2, 2, 4)[0]
    assert sum(peak(order)) == 5
    assert peak(order, [1.0, 0.0, 100.0, 0.0])[2] == 2  # when the later stage's weigh more


def test_the_slowest_stage_sets_the_pace():
    line = simulate("1f1b", 3, 1, 30, [1.0, 1.0, 2.0], [2.0, 2.0, 4.0])
    assert line.seconds == pytest.approx(30 * 6 + 2 * 3)
    assert line.bubble == pytest.approx(1 - (3 + 3 + 6) * 30 / (3 * line.seconds))


def test_a_link_takes_its_time_and_one_message_after_another():
    assert simulate("gpipe", 2, 1, 1, [1.0] * 2, [2.0] * 2, [0.5]).seconds == 1 + 0.5 + 3 + 0.5 + 2
    slow = simulate("gpipe", 2, 1, 5, [1.0] * 2, [2.0] * 2, [10.0])
    assert slow.starts[Action("F", 1, 4)] == 1 + 5 * 10
