"""Documents in one row, and rows padded on the left, in every core."""

import pytest
import torch
from cores import WAYS, WINDOWED, at_once, build, inputs

way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
every_core = pytest.mark.parametrize("core", WINDOWED)


@way
@pytest.mark.parametrize("batch", [1, 2])
@every_core
def test_documents_do_not_see_each_other(core, batch, way):
    # pitfall (Packed documents): row of docs [6][6]; change the last token of doc 1; with and without a cache
    module, x = build(core), inputs(batch)
    ids = torch.tensor([[0] * 6 + [1] * 6]).expand(batch, -1)
    changed = x.clone()
    changed[:, 5] += 1
    grads = []
    for given in (x, changed):
        given = given.clone().requires_grad_()
        way(module, given, ids)[:, 6:].square().sum().backward()
        grads.append(given.grad)
    assert way(module, changed, ids)[:, 6:].equal(way(module, x, ids)[:, 6:])
    assert grads[0][:, 6:].equal(grads[1][:, 6:])
    assert not grads[0][:, :6].any()
    torch.testing.assert_close(
        way(module, x, ids)[:, 6:], at_once(module, x[:, 6:].contiguous()), rtol=0, atol=1e-12
    )


@way
@every_core
def test_an_all_ones_mask_changes_nothing(core, way):
    # pitfall (Packed documents): isolation comes from explicit ids, never guessed from other arguments
    module, x = build(core), inputs(2)
    ones = torch.ones(2, 12, dtype=torch.long)
    torch.testing.assert_close(way(module, x, ones), at_once(module, x), rtol=0, atol=1e-12)


@way
@every_core
def test_short_documents_equal_their_own_runs(core, way):
    # pitfall (Packed documents): docs of 2, 1 and 5 tokens in one row, also shorter than the window
    module, x = build(core), inputs(2, 8)
    ids = torch.tensor([[7, 7, 3, 9, 9, 9, 9, 9]] * 2)
    y = way(module, x, ids)
    for start, stop in ((0, 2), (2, 3), (3, 8)):
        alone = at_once(module, x[:, start:stop].contiguous())
        torch.testing.assert_close(y[:, start:stop], alone, rtol=0, atol=1e-12)


@way
@every_core
def test_left_padded_rows_equal_their_own_runs(core, way):
    # pitfall (Positions; Local convolution state): left-padded rows, pads that are not zero
    module, x = build(core), inputs(3)
    ids = torch.zeros(3, 12, dtype=torch.long)
    ids[1, :9] = ids[2, :5] = -1
    y = way(module, x, ids)
    assert torch.isfinite(y).all()
    for row, start in enumerate((0, 9, 5)):
        alone = at_once(module, x[row : row + 1, start:].contiguous())
        torch.testing.assert_close(y[row : row + 1, start:], alone, rtol=0, atol=1e-12)


@every_core
def test_a_row_of_padding_is_finite_and_has_no_gradient(core):
    # pitfall (Masked rows): a row whose mask is all False gives exactly 0 and no NaN; others do not move
    module, x = build(core), inputs(2).requires_grad_()
    ids = torch.zeros(2, 12, dtype=torch.long)
    ids[1] = -1
    y = at_once(module, x, ids)
    torch.testing.assert_close(y[:1], at_once(module, x[:1]), rtol=0, atol=1e-12)
    if "mlp" not in core:
        assert not y[1].any()
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    if "mlp" not in core:
        assert not x.grad[1].any()
