"""Training memory: the bytes that a step saves for backward, as the network grows deeper."""

import pytest
from points import saved_bytes


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
@pytest.mark.parametrize("history", ["full", "int8"])
def test_saved_bytes_grow_linearly_with_depth(depth, history):
    if depth == "additive" and history != "full":
        pytest.skip("additive keeps no history")
    few, some, many = (saved_bytes(depth, n, history=history) for n in (12, 24, 48))
    early, late = (some - few) / 12, (many - some) / 24
    assert late == pytest.approx(early, rel=0.15)
