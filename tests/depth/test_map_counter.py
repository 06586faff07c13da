"""Which methods are not the read D: what softmax attention over depth can never do, and they do.

D does not see the order of older sources, and of equal sources x it gives x W_V whatever the token.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dual import CLOSE, WIDTH, D, Sources, moved_by_reordering
from points import perturb
from torch import Tensor

from twoaxis.depth import build
from twoaxis.depth.history import History
from twoaxis.ops import depth_read, local_attention, mix


def history(X: Sources) -> History:
    """Sources with their depth indices, as a state holds them."""
    return History(tuple(X), tuple(range(len(X))))


def static_reads() -> dict[str, Callable[[Sources], Tensor]]:
    """Reads of four sources by methods that the map calls no instance, each at a random point."""

    def at(spec: str, n_blocks: int = 4) -> tuple:
        torch.manual_seed(11)
        stream, blocks = build(spec, WIDTH, [["attention"]] * n_blocks)
        perturb(torch.nn.ModuleList([stream, *(c for (c,) in blocks)]).double(), 0.5)
        return blocks[3][0], blocks[2][0]

    mudd, dense = at("muddformer(ways=1)")[0].mix, at("denseformer")[1].alpha
    return {
        "muddformer": lambda X: mudd(X, X[-1])[0],
        "denseformer": lambda X: mix(X, dense),
        "elc_bert": lambda X: at("elc_bert")[0].mix(history(X)),
        "vertical_attention": lambda X: at("vertical_attention")[0].mix(history(X)),
        "dca": lambda X: at("dca")[0].grn(history(X))[0],
        "depth_conv": at("depth_conv")[0].taps,
    }


def test_attention_does_not_see_the_order_of_older_sources():
    """D has no depth position: what the counter-examples below fail."""
    X = tuple(torch.randn(4, 2, 3, WIDTH, dtype=torch.float64))
    W = torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    assert moved_by_reordering(lambda sources: D(sources, *W), X) < 1e-12


@pytest.mark.parametrize("name", static_reads())
def test_weights_of_depth_positions_are_no_instance(name):
    X = tuple(torch.randn(4, 2, 3, WIDTH, dtype=torch.float64))
    assert moved_by_reordering(static_reads()[name], X) > 0.1


def test_equal_sources():
    """D gives x W_V whatever the token. MUDDFormer gives (sum_j A_j) x, another factor for each token."""
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    W_Q, W_K, W_V = torch.randn(3, WIDTH, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(D((x,) * 4, W_Q, W_K, W_V), x @ W_V, **CLOSE)
    reads = static_reads()
    factor = reads["muddformer"]((x,) * 4) / x
    torch.testing.assert_close(factor, factor[..., :1].expand_as(factor))
    assert (factor - factor[0, 0]).abs().max() > 0.1
    free = reads["denseformer"]((x,) * 4) / x  # one factor for all, but not 1: free weights
    torch.testing.assert_close(free, free[0, 0, 0].expand_as(free))
    assert (free - 1).abs().min() > 0.1


def test_positions_as_keys_make_the_static_methods_instances():
    """One-hot keys by depth: softmax attention is ELC-BERT's mix, attention without softmax is MUDDFormer's."""
    X = tuple(torch.randn(4, 2, 3, WIDTH, dtype=torch.float64))
    torch.manual_seed(11)
    _, blocks = build("elc_bert", WIDTH, [["mlp"]] * 4)
    elc = perturb(blocks[3][0].mix).double()
    places = torch.eye(4, dtype=torch.float64)
    z = local_attention(
        *(rows.expand(6, 1, *rows.shape) for rows in (2 * elc.logits[None], places)),
        torch.stack(X, 2).flatten(0, 1).unsqueeze(1)[..., :4],  # the operator takes heads of one width
        None,
    )
    torch.testing.assert_close(elc(history(X))[..., :4].flatten(0, 1), z[:, 0, 0], **CLOSE)

    _, blocks = build("muddformer(ways=1)", WIDTH, [["attention"]] * 4)
    mudd = perturb(blocks[3][0].mix).double()
    q = mudd.weights(X[-1]).squeeze(-2)  # (B, T, n), made from the newest source
    keys = tuple(row.expand_as(q) for row in places)
    _, a = depth_read(q, keys, key_norm_eps=None, normalize="none", return_weights=True)
    torch.testing.assert_close(mudd(X, X[-1])[0], mix(X, a.unbind(-1)), **CLOSE)
