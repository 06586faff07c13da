"""What the dry run says of a process under tensor parallelism and FSDP, held to a step of two real ones.

Pipelines are held to it in test_simulated.py.
"""

import pytest

FSDP, TP = {"data_parallel": 2, "sharding": "fsdp"}, {"tensor_parallel": 2}
TRAINED = ("weights", "gradients", "optimizer")


def full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("depth", "more"),
    [
        ("attnres", {}),
        ("lime", {}),  # attention stays whole
        full("additive", {"tie_embeddings": False, "qk_norm": True}),
        full("ddl", {}),
        full("additive", {"sequence": ["short_swa(window=3)", "mlp"]}),
    ],
)
def test_slices(world, depth, more):
    for measured, counted in world(2).run("measured.step", depth, TP, more):
        assert measured == counted


# shares of odd sizes: the first process has most, as is counted for all
@pytest.mark.parametrize(
    ("depth", "more"),
    [
        ("ddl", {}),
        full("attnres", {}),
        full("lime", {}),
        full("additive", {"tie_embeddings": False, "qk_norm": True}),
    ],
)
def test_shares(world, depth, more):
    (measured, counted), (other, _) = world(2).run("measured.step", depth, FSDP, more)
    assert measured == counted
    assert all(0.9 * counted[part] < other[part] <= counted[part] for part in TRAINED)
    assert other["saved"] == counted["saved"]
