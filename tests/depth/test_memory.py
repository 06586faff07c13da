"""Training memory: the bytes that a step saves for backward, as the network grows deeper."""

import pytest
from points import saved_bytes

BLOCKS = (4, 8, 16)  # a copy of every source for every reader would raise the slope by a third or more


@pytest.mark.parametrize(
    "depth",
    [
        "additive",
        "denseformer",
        "denseformer(dilation=4, period=5)",
        "attnres",
        "attnres(block_sublayers=3)",
        "depth_window",
        "elc_bert",
        "lime",
        "lime(kind='dynamic')",
        "delta_attnres(null_source=True, gate='vector')",
        "attnres(key_rank=8)",
    ],
)
def test_saved_bytes_grow_linearly_with_depth(depth):
    grows_linearly(depth)


@pytest.mark.parametrize("depth", ["denseformer", "attnres"])
def test_saved_bytes_grow_linearly_from_12_to_48_blocks(depth):
    grows_linearly(depth, (12, 24, 48))


@pytest.mark.parametrize("depth", ["attnres(key_rank=8)", "lime"])
def test_saved_bytes_of_a_rounded_history_grow_linearly_too(depth):
    """Reads that cut or project a source keep it as it is stored, not a plain copy for every reader."""
    grows_linearly(depth, history="int8")


def grows_linearly(depth, blocks=BLOCKS, **options):
    few, some, many = (saved_bytes(depth, n, **options) for n in blocks)
    early, late = (some - few) / (blocks[1] - blocks[0]), (many - some) / (blocks[2] - blocks[1])
    assert late == pytest.approx(early, rel=0.15)
