"""Operators under `torch.func`'s transforms and in forward mode: their equations, differentiated by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from twoaxis import InputError, ops
from twoaxis.depth.stored import store
from twoaxis.model.loss import chunked_token_loss
from twoaxis.ops import choice, mix, reference
from twoaxis.verify.operators import Operator, operators

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop:UserWarning"
    ),  # vmap, of torch's attention
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # forward mode
]
HEADS = [(2, 4, 7, 3), (2, 2, 7, 3), (2, 2, 7, 3)]
OPERATORS = {
    **{operator.name: operator for operator in operators()},
    "channel_read": Operator("channel_read", [(3, 5, 4), (5, 4)], lambda f, *xs: f(*xs), ""),
    "joint_scores": Operator("joint_scores", [(3, 4, 5), (20, 24)], lambda f, *xs: f(*xs, 1e-6), ""),
    "sinkhorn": Operator("sinkhorn", [(3, 3, 3)], lambda f, x: f(x, 5, eps=1e-3), ""),
    "attention by torch": Operator("local_attention", HEADS, lambda f, *xs: f(*xs, 3), ""),
    "attention by blocks": Operator(
        "local_attention", HEADS, lambda f, *xs: f(*xs, 3, backend="blocked"), ""
    ),
    "attention with a sink": Operator(
        "local_attention", [*HEADS, (4,)], lambda f, *xs: f(*xs[:3], 3, sink_logits=xs[3]), ""
    ),
}
every = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def test_every_equation_is_here() -> None:
    known = {*reference.__all__} & {*ops.__all__} - {"rms"}  # which is torch's own operations
    assert known == {operator.name for operator in OPERATORS.values()}


def gradients(operator: Operator, inputs: list[Tensor], along: Tensor) -> tuple[Tensor, ...]:
    """Of the equation, by autograd."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad((operator.exact(*leaves) * along).sum(), leaves)


@every
def test_gradients_by_a_transform(operator: Operator) -> None:
    inputs = operator.inputs()
    along = torch.randn_like(operator.exact(*inputs))
    numbers = tuple(range(len(inputs)))
    found = torch.func.grad(lambda *xs: (operator.fast(*xs) * along).sum(), numbers)(*inputs)
    torch.testing.assert_close(found, gradients(operator, inputs, along))


@every
def test_forward_mode(operator: Operator) -> None:
    # <along, J t> = <J^T along, t>
    inputs = operator.inputs()
    tangents = tuple(x.cos() for x in inputs)
    out, tangent = torch.func.jvp(operator.fast, tuple(inputs), tangents)
    along = torch.randn_like(out)
    back = gradients(operator, inputs, along)
    torch.testing.assert_close(out, operator.exact(*inputs))
    torch.testing.assert_close((along * tangent).sum(), sum((g * t).sum() for g, t in zip(back, tangents)))


@every
def test_many_inputs_at_once(operator: Operator) -> None:
    inputs = [torch.stack((x, x.cos())) for x in operator.inputs()]
    found = torch.vmap(operator.fast, randomness="same")(*inputs)
    torch.testing.assert_close(found[1], operator.exact(*(x[1] for x in inputs)))


def test_dual_numbers_without_a_transform() -> None:
    x, t = torch.randn(2, 3, 5)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(mix((forward_ad.make_dual(x, t),), torch.full((1,), 2.0))).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, 2 * t)
    assert not choice.transformed()


REFUSED = {
    "sources in fewer bits": (lambda x: store(x, "int8").sum(), "history='full'"),
    "the chunked loss": (
        lambda x: chunked_token_loss(x, torch.ones(7, 5), torch.ones(2, 3, dtype=torch.int64)),
        "whole logits",
    ),
}


@pytest.mark.parametrize(("f", "advice"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_equation_is_refused_in_a_line(f, advice) -> None:
    with pytest.raises(InputError, match=rf"torch\.func's transforms.*{advice}"):
        torch.func.grad(f)(torch.randn(2, 3, 5))
