"""Where a method can start as the standard Transformer, one of its specs does; where none can, no spec says so."""

from __future__ import annotations

import pytest
import torch

import twoaxis
from configurations import Case, depths, perturb, tokens

STANDARD = {  # the spec nearest to the defaults with such a start
    "additive": "additive",
    "attnres": "attnres",
    "dca": "dca",
    "delta_attnres": "delta_attnres(gate='alpha')",
    "denseformer": "denseformer",
    "depth_conv": "depth_conv",
    "depth_window": "depth_window",
    "dynamic_window": "dynamic_window",
    "elc_bert": "elc_bert(variant='weighted_output', normalize='none')",
    "hyper_connections": "hyper_connections",
    "lime": "lime(start='standard')",
    "mhc": "mhc(start='standard')",
    "muddformer": "muddformer",
    "residual_scalars": "residual_scalars",
    "value_residual": "value_residual(form='learnable', start='standard')",
}
NEVER = {  # and why
    "ddl": "with beta = 0 it is the identity, else its write depends on the direction of the output alone",
    "depth_attention": "a softmax over several sources gives none of them the weight 1",
    "hybrid": "its gate stands between the two reads",
    "silu_increment": "the branch passes through SiLU",
    "svformer": "later attentions have no values of their own",
    "vertical_attention": "a softmax over several sources gives none of them the weight 1",
}


def test_every_method_is_in_one_of_the_lists() -> None:
    assert sorted([*STANDARD, *NEVER]) == sorted(twoaxis.methods("depth"))


@pytest.mark.parametrize("spec", [*STANDARD.values(), *depths()])
def test_a_fresh_model_is_the_standard_one_of_the_same_weights(spec: str) -> None:
    """Logits equal those of `additive`: exactly, or where a norm's eps meets another scale, at eps 0."""
    promise = twoaxis.parse_spec("depth", spec).standard_start()
    if spec in STANDARD.values():
        assert promise != "no"
    if promise == "no":
        return
    eps = 0.0 if promise == "up to eps" else 1e-6
    model, plain = (Case(s).fresh(norm_eps=eps).double() for s in (spec, "additive"))
    for block in model.blocks:
        perturb(block.cores)
    weights = model.state_dict()
    plain.load_state_dict({name: weights.get(name, w) for name, w in plain.state_dict().items()})
    torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=0, atol=1e-10 if eps == 0 else 1e-12)


@pytest.mark.parametrize("method", NEVER)
def test_the_others_promise_nothing(method: str) -> None:
    specs = [s for s in depths() if s.split("(")[0] == method]
    assert specs
    assert {twoaxis.parse_spec("depth", s).standard_start() for s in specs} == {"no"}


@pytest.mark.parametrize(
    "spec",
    [
        "value_residual(form='identity', start='standard')",
        "value_residual(form='gated', start='standard')",
        "lime(kind='dynamic', start='standard')",
    ],
)
def test_a_form_without_such_a_start_refuses_it(spec: str) -> None:
    with pytest.raises(twoaxis.InputError, match="start='standard'"):
        twoaxis.parse_spec("depth", spec)
