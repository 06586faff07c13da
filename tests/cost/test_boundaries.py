"""What pipelines send, by transport."""

import pytest

import twoaxis
from twoaxis.cost import boundaries

B, T, D = 2, 5, 24
u = 4 * B * T * D


def sent(depth, n_blocks, cuts, ranks=None, **fields):
    cfg = twoaxis.ModelConfig(vocab_size=11, d_model=D, n_blocks=n_blocks, n_heads=2, depth=depth, **fields)
    return boundaries(cfg, B, T, cuts, ranks)


@pytest.mark.parametrize(("P", "V"), [(2, 1), (2, 2), (4, 2), (3, 3)])
def test_cached_block_attention_residuals_send_each_block_to_a_rank_once(P, V):
    # methods: P (P - 1) / 2 + (V - 1) P^2 new blocks; a rank that keeps those it made itself needs (V - 1) P
    # fewer. The embeddings go to every other rank once.
    C = P * V
    found = sent("attnres(block_sublayers=2)", C, range(1, C), P)
    assert sum(b.sent["cached"] for b in found) == u * (P * (P - 1) // 2 + (V - 1) * P * (P - 1) + P - 1)
    assert sum(b.sent["full"] for b in found) == u * (C * (C - 1) // 2 + C - 1)


@pytest.mark.parametrize("cut", range(1, 8))
def test_denseformer_pushes_one_sum_for_each_later_mix(cut):
    (at,) = sent("denseformer", 8, [cut])
    assert at.sent["full"] == (1 + cut + 1) * u
    assert at.sent["push"] == (1 + min(cut + 1, 8 - cut)) * u


@pytest.mark.parametrize("cut", range(1, 8))
def test_dca_pushes_three_sums_for_each_later_block_and_one_for_the_end(cut):
    (at,) = sent("dca", 8, [cut])
    assert at.sent == {"full": at.sent["window"], "window": (cut + 1) * u, "cached": (cut + 1) * u,
                       "push": min(cut + 1, 3 * (8 - cut) + 1) * u}  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "sequence", "times"),
    [
        ("additive", ["short_swa(window=3)", "attention", "mlp"], 1),
        ("additive", ["canon(set='ABCD')"], 1),
        ("ddl", ["attention", "mlp"], 1),
        ("ddl(value_dim=4)", ["attention", "mlp"], 4),
        ("hyper_connections(streams=3)", ["attention", "mlp"], 3),
        ("mhc", ["attention", "mlp"], 4),
        ("depth_window(window_blocks=2)", ["attention", "mlp"], 2),
    ],
)
def test_boundaries_in_streams(depth, sequence, times):
    for at in sent(depth, 4, [2, 3], sequence=sequence):
        assert set(at.sent.values()) == {times * u}


def test_reads_by_content_cannot_be_pushed():
    for depth in ("attnres", "muddformer", "depth_window"):
        (at,) = sent(depth, 6, [5])
        assert at.sent["push"] == at.sent["window"]


def test_the_state_may_be_sent_in_half_the_bytes():
    (wide,), (half,) = (sent("attnres", 4, [2], state_dtype=t) for t in ("float32", "bfloat16"))
    assert 2 * half.sent["full"] == wide.sent["full"]


@pytest.mark.parametrize(
    ("cuts", "ranks"),
    [([0], None), ([4], None), ([2, 2], None), ([3, 1], None), ([2], 3), ([2], 0), ([2], True)],
)
def test_cuts_that_are_none_are_refused(cuts, ranks):
    with pytest.raises(twoaxis.InputError, match="give increasing numbers of blocks, 1 to 3"):
        sent("additive", 4, cuts, ranks)
