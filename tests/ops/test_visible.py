"""The window itself: what it counts, what it refuses, and the mask that everything is held to."""

import numpy as np
import pytest
import torch

from twoaxis.errors import InputError
from twoaxis.ops import check_window, local_attention, reference, visible, visible_pairs
from twoaxis.ops.window import segment_order

BAD = [0, -1, 2.5, True, False, "4", 1.0, [4]]


@pytest.mark.parametrize("window", BAD, ids=repr)
def test_bad_windows_are_refused_by_name_before_tensor_work(window):
    """Pitfall: w=0, -1, 2.5, True, '4' -> an error naming the argument before any tensor work."""
    with pytest.raises(InputError, match=r"^window="):
        check_window(window)
    with pytest.raises(InputError, match=r"^depth_window="):
        check_window(window, "depth_window")
    for attend in (local_attention, reference.local_attention):
        with pytest.raises(InputError, match=r"^window="):
            attend(None, None, None, window)  # not even tensors: the window is looked at first


def test_good_windows_become_int_or_none():
    assert check_window(None) is None
    for window in (1, 7, np.int64(7)):
        assert type(check_window(window)) is int


def test_mask_counts_the_current_position():
    """Pitfall: Tq=1 or 2 new queries against Tk=5 keys -> query i sees keys 0..Tk-Tq+i, by position."""
    assert visible(5, 5, 1).equal(torch.eye(5, dtype=torch.bool))
    assert visible(3, 5, 2).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert visible(2, 5, None).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert visible(1, 5, None).all()


def test_mask_with_segments_padding_and_sinks():
    ids = torch.tensor([[-1, 4, 4, 4, 0, 0]])
    assert visible(6, 6, 2, ids).int().tolist() == [
        [
            [0, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [0, 1, 1, 0, 0, 0],
            [0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 1],
        ]
    ]
    sink = visible(6, 6, 2, ids, sink_tokens=1)
    assert sink[0, 3].int().tolist() == [
        0,
        1,
        1,
        1,
        0,
        0,
    ]  # the first token of its own segment, not of the row
    assert visible(4, 4, 2, sink_tokens=1).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 0, 1, 1],
    ]


@pytest.mark.parametrize("T", [0, 1, 5, 33])
@pytest.mark.parametrize("window", [1, 2, 7, 33, 40, None])
def test_pairs_are_the_true_entries_of_the_mask(T, window):
    assert visible_pairs(T, window) == visible(T, T, window).sum()


def test_pairs_of_a_long_sequence():
    """Pitfall: T=2048, w=512 -> 917760 pairs."""
    assert visible_pairs(2048, 512) == 917760


def test_rank_of_a_token_in_its_segment():
    ids = torch.tensor([[-1, 0, 0, 1, 1, 0], [2, 2, 2, 2, 1, 1]])
    order, place, rank = segment_order(ids)
    assert rank.tolist() == [[0, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    assert order.gather(1, place).equal(torch.arange(6).expand(2, 6))


def test_queries_must_be_the_last_positions():
    with pytest.raises(InputError, match="Tq=4, Tk=3"):
        visible(4, 3, None)
