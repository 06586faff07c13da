"""What stays for the backward pass: equal gradients, and bytes as the cost model says."""

import contextlib
import gc
from unittest.mock import patch

import pytest
import torch

from configurations import Case, depths, fits, tokens
from twoaxis import InputError, methods
from twoaxis.cost.passes import traced
from twoaxis.cost.stages import kept
from twoaxis.model.offload import Copy, Offload
from twoaxis.model.saving import Saving
from twoaxis.ops import choice
from twoaxis.verify.saved import saved_bytes


def full(value):
    return pytest.param(value, marks=pytest.mark.full)


WAYS = [Saving("blocks"), Saving("blocks", 2), Saving("cores"), Saving("host")]
METHODS = methods("depth")
INSIDE = (
    "lime",
    "svformer",
    "value_residual",
    "depth_attention",
    "hybrid",
)  # they enter attentions by halves
COUNTED = [d if d in METHODS else full(d) for d in depths()]
HOSTED = [d if d in ("additive", "hyper_connections", "hybrid") else full(d) for d in depths()]


@pytest.mark.parametrize("depth", [d if d in methods("depth") else full(d) for d in depths()])
def test_gradients_are_equal(depth):
    case = Case(depth, "standard")
    if not fits(case):
        pytest.skip("needs other blocks")
    model, rows = case.model().train(), tokens()
    expected = gradients(model, rows)
    for model.saving in WAYS:
        torch.testing.assert_close(gradients(model, rows), expected, rtol=1e-10, atol=1e-12)


def test_dropout_draws_the_same_numbers_again():
    model, rows = Case("attnres", "parallel").model(dropout=0.3).train(), tokens()
    found = []
    for model.saving in (Saving(), *WAYS):
        torch.manual_seed(3)
        found.append(gradients(model, rows))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)


def gradients(model, rows):
    model.zero_grad()
    model.loss(rows, rows).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def counted(case):
    """A model that reads as much as it can, and its pass in sizes."""
    model = case.fresh(n_blocks=4)
    for module in model.modules():
        if hasattr(module, "read_widest"):
            module.read_widest()
    return model, traced(case.config(n_blocks=4), 2, 13)


@pytest.mark.parametrize(
    "saving", [Saving("cores"), full(Saving("blocks", 2)), full(Saving("cores", 3))], ids=str
)
@pytest.mark.parametrize("depth", COUNTED)
def test_saved_bytes_fall_as_the_cost_model_says(depth, saving):
    falls(Case(depth), saving)


@pytest.mark.parametrize(
    "depth", [full(d) if d != "lime" else d for d in INSIDE if fits(Case(d, "parallel"))]
)
def test_halves_of_attentions_in_parallel_are_counted(depth):
    falls(Case(depth, "parallel"), Saving("cores"))


def falls(case, saving):
    rows, (model, t) = tokens(), counted(case)
    expected = kept(t, range(4), saved=saving.saved, every=saving.every)
    model.saving = saving
    measured = saved_bytes(model, rows, rows.clone())
    assert measured == nbytes(expected.arrays) + 8  # the number of targets, which `loss` counts itself
    assert measured < nbytes(kept(t, range(4)).arrays)


@pytest.mark.parametrize("depth", HOSTED)
def test_what_is_kept_on_the_host_leaves_the_device(depth):
    rows, (model, t) = tokens(), counted(Case(depth))
    model.saving = Saving("host")  # not the decoder's own loop, which would make states again
    hooks, made = Offload(model, torch.device("cpu")), []

    class Kept(Copy):
        """A copy that stays even where the loss does not depend on what saved it."""

        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    counting = patch("twoaxis.model.offload.Copy", Kept)
    with choice.requesting("plain"), hooks, counting, patch.object(Saving, "around", nothing):
        loss = model.loss(rows, rows.clone())
    gc.collect()
    expected = kept(t, range(4), saved="host")
    found = [(copy.host.nbytes, copy.storage.expired()) for copy in made]
    assert sum(count for count, _ in found) == nbytes(expected.host)
    alive = sum(count for count, gone in found if not gone)
    assert alive < 0.02 * nbytes(expected.host)
    assert nbytes(expected.arrays) < 0.1 * nbytes(expected.host)
    loss.backward()
    made.clear()
    del loss
    gc.collect()
    assert not hooks.copies


def nothing(self, model, device):
    return contextlib.nullcontext()


def nbytes(arrays):
    return sum(x.nbytes for x in arrays)


@pytest.mark.parametrize(
    ("options", "said"), [(("disk",), "all, blocks, cores, host"), (("cores", 0), "1 or more")]
)
def test_what_does_not_exist_is_refused(options, said):
    with pytest.raises(InputError, match=said):
        Saving(*options)
