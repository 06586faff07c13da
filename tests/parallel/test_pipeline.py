"""Pipelines under the real schedules: gradients, steps and bytes equal one process and the plan.

`pytest` runs each method under one schedule (and a few over 4 ranks), `pytest -m full` all of everything.
"""

import zlib

import pytest

from configurations import SEQUENCES, Case, depths, fits
from twoaxis import Decoder, InputError, ModelConfig, methods
from twoaxis.parallel import Pipeline, plan_pipeline

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual": 2},
    "looped gpipe": {"schedule": "gpipe", "virtual": 2},
}


def turn(depth: str) -> str:
    """One schedule for each method, always the same; one without a cache for those that only have defaults."""
    return list(SCHEDULES)[zlib.crc32(depth.encode()) % len(SCHEDULES)]


def test_without_processes_a_pipeline_says_what_it_needs():
    cfg = ModelConfig(vocab_size=7, d_model=8, n_blocks=1, n_heads=2)
    plan = plan_pipeline(cfg, n_ranks=1, batch_size=1, seq_len=3)
    with pytest.raises(InputError, match="init_process_group"):
        Pipeline(Decoder(cfg), plan, micro_batches=1)


# pitfalls, parallel training: "2, 3 and 4 stages ... an uneven layer split, a stage with no layer"
@pytest.mark.parametrize("depth", methods("depth"))
def test_gradients_equal_one_process(world, depth):
    name = turn(depth)
    world(2).run("equal_training", depth, **SCHEDULES[name], segments=name != "gpipe")


def full(*case: str):
    """A case of the full tier; the default cases cover what it shows pairwise."""
    return pytest.param(*case, marks=pytest.mark.full)


CACHED = ["dca", "residual_scalars", full("attnres(block_sublayers=2)"), full("value_residual")]
PUSHED = [
    "elc_bert(variant='weighted_output', normalize='none')",
    "vertical_attention",
    full("denseformer(dilation=2)"),
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
        full("hyper_connections", "1f1b"),
    ],
)
def test_four_ranks(world, depth, schedule):
    world(4).run("equal_training", depth, **SCHEDULES[schedule], segments=True)


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        pytest.param("denseformer", {"schedule": "1f1b"}, marks=pytest.mark.full),
        ("depth_window", {"schedule": "interleaved", "virtual": 2}),
        pytest.param("ddl", {"schedule": "gpipe", "optimizer": "muon"}, marks=pytest.mark.full),
    ],
    ids=["push", "cached and shared weights", "muon"],
)
def test_optimiser_steps_stay_equal_over_20_steps(world, depth, options):
    world(2).run("equal_optimisation", depth, **options)


# pitfalls, parallel training: "2 stages with gradient norms 3 and 4, clip at 1 -> total 5 ... counted once"
def test_the_norm_is_over_all_stages_and_counts_a_shared_parameter_once(world):
    for rank, (norm, after, shared) in enumerate(world(2).run("clipped")):
        assert (norm, shared) == (5.0, 5.0)
        assert after == pytest.approx((3, 4)[rank] / 5, rel=1e-5)


# pitfalls, parallel training: "4 stages, state e created in stage 0, read only in stages 0 and 3 ... also when one
# micro-batch uses it and another does not"
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_state_that_only_the_last_of_four_stages_reads(world, schedule):
    world(4).run("recalling.used_far_away", schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved"])
def test_a_state_in_the_cache_that_some_micro_batches_do_not_read(world, schedule):
    world(2).run("recalling.used_far_away", schedule, virtual=2)


# pitfalls, parallel training: "a mismatch is an error at start"
def test_ranks_with_different_plans_refuse_at_the_start(world):
    for said in world(2).run("refused_where_plans_differ"):
        assert "different plans" in said


@pytest.mark.parametrize(
    ("depth", "schedule"),
    [
        ("hyper_connections", "gpipe"),
        full("attnres", "1f1b"),
        full("ddl(value_dim=4)", "1f1b"),
        full("dca", "gpipe"),
        full("additive", "1f1b"),
    ],
)
def test_a_state_sent_in_bfloat16_is_half_the_bytes(world, depth, schedule):
    for error, sent, exact in world(2).run("bfloat16_on_the_wire", depth, schedule):
        assert 2 * sent == exact
        assert 0 < error < 0.03


# the paper's claim on what pipelines send (arXiv 2603.16039), on the wire: link 0 of two stages, or 0 and 2 of four
TIMES = {
    "additive": 1,
    "ddl": 1,
    "ddl(value_dim=4)": 4,
    "ddl(value_dim=2)": 2,
    "hyper_connections(streams=3)": 3,
    "mhc(streams=4)": 4,
}
POINTS = [
    *(
        (depth, sequence)
        for depth in ("additive", "ddl")
        for sequence in SEQUENCES
        if fits(Case(depth, sequence))
    ),
    *((depth, "standard") for depth in TIMES if TIMES[depth] > 1),
]
SENT = [  # by default each point under one schedule
    (*point, name) if (i - k) % len(SCHEDULES) == 0 else full(*point, name)
    for i, point in enumerate(POINTS)
    for k, name in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("depth", "sequence", "name"), SENT)
def test_a_boundary_carries_the_additive_models_bytes_or_so_many_times_as_much(world, depth, sequence, name):
    options = SCHEDULES[name]
    links, additive = (
        2 * options.get("virtual", 1) - 1,
        4 * 2 * 5 * 12 * 8,
    )  # micro-batches of (2, 5, 12) in float64
    sent = world(2).run("sent_over_links", depth, sequence, **options)
    found = {key: nbytes for one in sent for key, nbytes in one.items()}
    ways = ("forward", "backward")
    assert found == {(link, way): TIMES[depth] * additive for link in range(links) for way in ways}


@pytest.mark.parametrize("counts", [(0, 5), (5, 0)], ids=["first", "last"])
@pytest.mark.parametrize("depth", ["attnres", full("denseformer"), full("depth_window")])
def test_a_stage_with_an_end_and_no_layers(world, depth, counts):
    world(2).run("equal_training", depth, schedule="1f1b", counts=counts)


KEPT = ["int8", "bfloat16", "recompute"]


@pytest.mark.parametrize(
    ("depth", "history", "name"),
    [
        ("attnres", "int8", "interleaved"),
        ("dca", "recompute", "1f1b"),
        *(
            full(depth, history, name)
            for depth in ("attnres(block_sublayers=2)", "denseformer", "depth_window", "muddformer")
            for history in KEPT
            for name in SCHEDULES
        ),
    ],
)
def test_histories_kept_in_fewer_bits_or_made_again_cross_a_boundary(world, depth, history, name):
    world(2).run("equal_training", depth, history=history, **SCHEDULES[name])


@pytest.mark.parametrize("depth", [d if d in ("additive", "ddl") else full(d) for d in depths()])
def test_gradients_in_float32(world, depth):
    """Where sums in float32 may be off by: `equal_training`."""
    world(2).run("equal_training", depth, dtype="float32", **SCHEDULES[turn(depth)])


@pytest.mark.full
@pytest.mark.parametrize("depth", depths())
def test_optimiser_steps_of_every_method_stay_equal_over_20_steps(world, depth):
    world(2).run("equal_optimisation", depth, **SCHEDULES[turn(depth)])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4], ids="P={}".format)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("depth", depths())
def test_everything(world, depth, schedule, ranks):
    world(ranks).run("equal_training", depth, **SCHEDULES[schedule], steps=3, segments=True)
