"""The simulated schedule and the dry run, held to real pipelines: order of passes, what is live, bytes."""

import pytest

RUNS = {
    "gpipe": {"pipeline_schedule": "gpipe"},
    "1f1b": {"pipeline_schedule": "1f1b"},
    "interleaved": {"pipeline_schedule": "interleaved", "pipeline_virtual": 2},
    "looped gpipe": {"pipeline_schedule": "gpipe", "pipeline_virtual": 2},
}
EXACT = ["additive", "depth_window", "ddl(value_dim=3)", "dca"]
ROUGH = [
    "denseformer",
    "hyper_connections",
]  # sums sent ahead keep their weights; a constant is shared: some bytes


def full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


QUICK = [("additive", "1f1b"), ("depth_window", "interleaved"), ("denseformer", "gpipe")]
CASES = [(d, n) if (d, n) in QUICK else full(d, n) for d in (*EXACT, *ROUGH) for n in RUNS]


@pytest.mark.parametrize(("depth", "name"), CASES)
def test_a_real_step_runs_in_the_simulated_order_and_holds_what_was_counted(world, depth, name):
    for found in world(2).run("watched.simulated", depth, 5 if name == "1f1b" else 4, **RUNS[name]):
        assert found["held"] == pytest.approx(found["counted"], rel=0 if depth in EXACT else 3e-3)


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        ("depth_window", {"pipeline_schedule": "1f1b", "pipeline_split": (0, 2, 1, 2)}),
        full(
            "ddl(value_dim=3)",
            {"pipeline_schedule": "interleaved", "pipeline_virtual": 2, "checkpointing": True},
        ),
        full("additive", {"pipeline_schedule": "1f1b", "pipeline_send": "bfloat16"}),
        full("additive", {"pipeline_schedule": "1f1b", "optimizer": "muon", "checkpointing": True}),
    ],
    ids=["uneven", "recomputed, two stages each", "sent in bfloat16", "recomputed"],
)
def test_four_processes_hold_what_was_counted(world, depth, options):
    for found in world(4).run("watched.simulated", depth, 8, **options):
        assert found["held"] == found["counted"]
