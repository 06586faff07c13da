"""Pipelines under the real schedules: gradients, steps and bytes equal one process and the plan.

`pytest` runs each method under one schedule (and a few over 4 ranks), `pytest -m full` all of everything.
"""

import zlib

import pytest

from configurations import depths
from twoaxis import methods

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual": 2},
    "looped gpipe": {"schedule": "gpipe", "virtual": 2},
}


def turn(depth: str) -> str:
    """One schedule for each method, always the same; one without a cache for those that only have defaults."""
    return list(SCHEDULES)[zlib.crc32(depth.encode()) % len(SCHEDULES)]


# pitfalls, parallel training: "2, 3 and 4 stages ... an uneven layer split, a stage with no layer"
@pytest.mark.parametrize("depth", methods("depth"))
def test_gradients_equal_one_process(world, depth):
    name = turn(depth)
    world(2).run("equal_training", depth, **SCHEDULES[name], segments=name != "gpipe")


CACHED = ["attnres(block_sublayers=2)", "dca", "value_residual", "residual_scalars"]
PUSHED = [
    "elc_bert(variant='weighted_output', normalize='none')",
    "denseformer(dilation=2)",
    "vertical_attention",
]


@pytest.mark.parametrize("depth", CACHED)
def test_each_entry_of_a_cache_gets_its_whole_gradient(world, depth):
    nbytes = world(2).run("equal_training", depth, **SCHEDULES["interleaved"])[0]
    assert nbytes["cached"] < nbytes["full"]


@pytest.mark.parametrize("depth", PUSHED)
def test_sums_sent_ahead_equal_the_sources(world, depth):
    nbytes = world(2).run("equal_training", depth, **SCHEDULES["1f1b"])[0]
    assert nbytes["push"] < nbytes["full"]


@pytest.mark.parametrize(
    ("depth", "schedule"),
    [
        ("elc_bert", "1f1b"),
        ("depth_window", "gpipe"),
        ("attnres(block_sublayers=2)", "interleaved"),
        ("denseformer", "interleaved"),
        ("hyper_connections", "1f1b"),
    ],
)
def test_four_ranks(world, depth, schedule):
    world(4).run("equal_training", depth, **SCHEDULES[schedule], segments=True)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4], ids="P={}".format)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("depth", depths())
def test_everything(world, depth, schedule, ranks):
    world(ranks).run("equal_training", depth, **SCHEDULES[schedule], steps=3, segments=True)
