"""What the framework asks of a runner, on a case made by hand: out = 3 x + p, cotangent 2."""

import pytest
import torch
from torch import nn

from twoaxis.verify.golden import Case, check
from twoaxis.verify.golden.folder import SIGNS
from twoaxis.verify.golden.rules import bound, error


def by_hand(**tensors: torch.Tensor) -> Case:
    ones = torch.ones(2, dtype=torch.float64)
    whole = {"in.x": ones, "param.p": ones, "out.y": 4 * ones, "cot.y": 2 * ones}
    whole |= {"grad.in.x": 6 * ones, "grad.param.p": 2 * ones, **tensors}
    return Case("hand/made", {}, whole)


def honest(case: Case) -> None:
    case.output("out.y", 3 * case.leaf("in.x") + case.leaf("param.p"))


def verdict(case: Case, *steps) -> tuple[str, str]:
    for step in steps:
        step(case)
    result = check(case, "hand")
    return result.status, result.detail


def test_an_honest_replay_is_ok():
    assert verdict(by_hand(), honest) == ("ok", "")


@pytest.mark.parametrize(
    ("replay", "why"),
    [
        (lambda c: None, "out.y was not used or computed"),
        (lambda c: c.output("out.y", 3 * c.leaf("in.x") + 1), "param.p was not used"),
        (
            lambda c: c.output("out.y", 3 * c.leaf("in.x") + c.value("param.p")),
            "gradient of param.p was not computed",
        ),
        (lambda c: c.output("out.y", 3 * c.leaf("in.x") + c.leaf("param.p").detach()), "grad.param.p is off"),
        (lambda c: c.output("out.y", 3 * c.leaf("in.x").detach() + c.leaf("param.p")), "grad.in.x is off"),
        (lambda c: c.output("out.y", (3 * c.leaf("in.x") + c.leaf("param.p"))[:1]), "out.y is off by inf"),
        (
            lambda c: c.output("out.y", 3 * c.leaf("in.x") + torch.nan * c.leaf("param.p")),
            "out.y is off by nan",
        ),
    ],
    ids=["nothing", "unused", "constant", "cut parameter", "cut input", "shape", "nan"],
)
def test_what_a_runner_leaves_out_is_a_failure(replay, why):
    status, detail = verdict(by_hand(), replay)
    assert status == "FAILED"
    assert why in detail


def test_a_second_route_to_an_output_is_compared_too():
    assert verdict(by_hand(), honest, honest) == ("ok", "")
    status, detail = verdict(
        by_hand(), honest, lambda c: c.output("out.y", torch.zeros(2, dtype=torch.float64))
    )
    assert (status, detail) == ("FAILED", "out.y is off by 1.0e+00 (bound 1e-12)")


def test_a_result_is_no_input():
    for name in ("out.y", "cot.y", "grad.in.x"):
        with pytest.raises(ValueError, match="not an input"):
            by_hand().leaf(name)


def test_a_parameter_that_should_have_no_gradient():
    case = by_hand(**{"param.q": torch.ones(2, dtype=torch.float64)})
    case.meta["parameters_without_gradient"] = ["q"]
    unused = verdict(case, honest, lambda c: c.leaf("param.q"))
    assert unused == ("ok", "")
    case = by_hand(**{"param.q": torch.zeros(2, dtype=torch.float64)})
    case.meta["parameters_without_gradient"] = ["q"]
    used = verdict(
        case, lambda c: c.output("out.y", 3 * c.leaf("in.x") + c.leaf("param.p") + c.leaf("param.q"))
    )
    assert used == ("FAILED", "param.q has a gradient and should have none")


def test_bound_modules_pass_gradients_to_the_files_tensors():
    case = by_hand()
    layer = nn.Linear(2, 2, dtype=torch.float64)
    case.bind(layer, {"weight": torch.diag(case.leaf("in.x")), "bias": case.leaf("param.p")})
    x = torch.full((2,), 3.0, dtype=torch.float64)
    assert verdict(case, lambda c: c.output("out.y", layer(x))) == ("ok", "")
    with pytest.raises(ValueError, match="no free parameter 'bias'"):
        case.bind(layer, {"bias": case.leaf("param.p")})
    with pytest.raises(ValueError, match="has shape"):
        case.bind(nn.Linear(2, 3), {"bias": case.leaf("param.p")})


def test_every_bound_is_stated_and_says_why():
    for family in SIGNS:
        assert bound(family, "case", torch.float64).output == 1e-12
        for stem in ("case", "model_x"):
            rule = bound(family, stem, torch.float32)
            assert 1e-6 < rule.output <= rule.gradient <= 2e-4
            assert rule.why
    assert bound("dca", "case", torch.bfloat16) is None


def test_an_exact_mask_does_not_hide_the_largest_error():
    case = by_hand(visible=torch.tensor([True, False]))
    case.output("visible", torch.tensor([True, False]))
    case.output("out.y", (3 + 1e-13) * case.leaf("in.x") + case.leaf("param.p"))
    result = check(case, "hand")
    assert (result.status, result.output_bound) == ("ok", 1e-12)
    assert result.output_error == pytest.approx(1e-13 / 4, rel=0.01)


def test_error_of_a_tensor():
    a = torch.tensor([1.0, -4.0])
    assert error(a + 0.4, a) == pytest.approx(0.1)
    assert error(a / 100 + 0.4, a / 100) == pytest.approx(0.4)
    assert error(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    assert error(torch.tensor([True]), torch.tensor([False])) == float("inf")
    assert error(torch.ones(0), torch.ones(0)) == 0
