"""`torch.func` of whole models: gradients, those of each row, and derivatives that go forward, as autograd has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

import twoaxis
from configurations import SEQUENCES, Case, depths, tokens
from twoaxis.ops import token_loss

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop:UserWarning"
    ),  # vmap, of torch's attention
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # forward mode
]
CASES = dict.fromkeys([*map(Case, depths()), *(Case("additive", name) for name in SEQUENCES)])
QUICK = {*map(Case, twoaxis.methods("depth")), Case("additive", "bias and sink")}  # attention by blocks


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.full) for c in CASES], ids=str
)
def test_transforms_of_a_model(case: Case) -> None:
    model, rows, targets = case.model(n_blocks=2), tokens(3, 5), tokens(3, 5, seed=2)
    named = dict(model.named_parameters())
    weights = {name: p.detach() for name, p in named.items()}

    def loss(weights: dict[str, Tensor], rows: Tensor, targets: Tensor) -> Tensor:
        logits = functional_call(model, weights, (rows,))
        return token_loss(logits.flatten(0, 1), targets.flatten())

    token_loss(model(rows).flatten(0, 1), targets.flatten()).backward()
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    torch.testing.assert_close(grad(loss)(weights, rows, targets), wanted)
    each = vmap(grad(loss), (None, 0, 0))(weights, rows[:, None], targets[:, None])
    torch.testing.assert_close({name: g.sum(0) for name, g in each.items()}, wanted)
    along = {name: w.cos() for name, w in weights.items()}
    tangent = jvp(lambda w: loss(w, rows, targets), (weights,), (along,))[1]
    torch.testing.assert_close(tangent, sum((g * along[name]).sum() for name, g in wanted.items()))
