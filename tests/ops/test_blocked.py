"""Blocked windows cost what they promise: work linear in T, nothing of size T w kept for backward."""

import pytest
from attention_cases import options, qkv
from torch.autograd.graph import saved_tensors_hooks

from twoaxis.ops import local_attention, visible_pairs
from twoaxis.ops.backends import blocked
from twoaxis.ops.backends.plan import block_plan, kept_keys


def saved_bytes(T: int, window: int, name: str = "plain") -> int:
    """Distinct storage that autograd keeps from one call."""
    kept: dict[int, int] = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.requires_grad_() for x in qkv(T)]
    kwargs, leaves = options(name, T, window)
    for leaf in leaves:
        kwargs[leaf].requires_grad_()
    with saved_tensors_hooks(pack, lambda x: x):
        local_attention(*inputs, window, backend="blocked", **kwargs)
    return sum(kept.values())


def test_saved_bytes_are_the_inputs():
    for T in (128, 256, 512):
        inputs = sum(x.numel() * x.element_size() for x in qkv(T))
        assert saved_bytes(T, 7) == saved_bytes(T, 64) == inputs


def test_saved_bytes_with_every_option_grow_with_tokens_alone():
    """Beside the inputs: the sink rows of each block, and one bit a token for padded queries."""
    for window in (7, 64):
        small, large = (saved_bytes(T, window, "all") for T in (256, 512))
        assert large <= 2 * small
        assert large <= 2 * saved_bytes(512, window)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 64, 200])
def test_planned_scores_are_linear_in_tokens(window):
    scores = [sum(block.scores for block in block_plan(T, window)) for T in (1024, 2048, 4096)]
    assert scores[2] - scores[1] == 2 * (scores[1] - scores[0])
    assert visible_pairs(4096, window) <= scores[2] <= 4096 * (window + 64 + 8)


@pytest.mark.parametrize("window", [1, 7, 64])
def test_computed_scores_are_the_planned_ones(window, monkeypatch):
    """Counted where they are made, forward and backward."""
    T, made = 300, []
    weights = blocked._Slab.weights
    monkeypatch.setattr(blocked._Slab, "weights", lambda *a: made.append(weights(*a)) or made[-1])
    q, k, v = (x.requires_grad_() for x in qkv(T))
    local_attention(q, k, v, window, backend="blocked").sum().backward()
    planned = sum(block.scores for block in block_plan(T, window))
    assert sum(x.numel() for x in made) == 2 * planned * 2 * 4  # twice, B = 2, H = 4


def test_every_query_is_in_one_block_with_all_its_keys():
    for Tq, Tk, window in (
        (300, 300, 7),
        (300, 420, 64),
        (1, 90, 16),
        (5, 5, None),
        (129, 200, 1),
        (70, 300, None),
    ):
        kept, asked = kept_keys(Tq, Tk, window), []
        for block in block_plan(Tq, window, Tk):
            asked += range(block.start, block.stop)
            oldest = 0 if window is None else max(0, kept - Tq + block.start - window + 1)
            assert 0 <= block.first <= oldest
            assert block.last == kept - Tq + block.stop
        assert asked == list(range(Tq))


def test_a_step_is_one_block_of_its_window():
    assert [block.scores for block in block_plan(1, 64, 5000)] == [64]
    assert [block.scores for block in block_plan(3, 64, 5000)] == [3 * 66]
    assert block_plan(0, 64) == ()
