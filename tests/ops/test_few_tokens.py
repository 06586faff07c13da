"""The operators of the depth axis on the few tokens of a decoding step: without gradients, by stacked sources."""

import pytest
import torch
from agreement import error

from twoaxis import InputError, ops
from twoaxis.ops import reference
from twoaxis.ops.precision import CHUNK, few

D = 6
READS = {
    "plain": {},
    "raw": {"key_norm_eps": None},
    "gains": {"key_gain": torch.randn(D), "scale": 0.4},
    "output": {"output_eps": 1e-6, "output_gain": torch.randn(D)},
    "heads": {"heads": 3, "normalize": "sigmoid"},
    "none": {"normalize": "none", "heads": 2},
    "hidden": {"bias": torch.tensor([0.5, -torch.inf, 1.0, 0.0, -2.0])},
    "all hidden": {"bias": torch.full((5,), -torch.inf)},
    "bias by token": {"bias": [torch.randn(2, 3) for _ in range(5)]},
}


def sources(shape=(2, 3), n=5, dtype=torch.float64):
    return tuple(torch.randn(*shape, 2 * D, dtype=dtype)[..., ::2] for _ in range(n))  # strided


@pytest.mark.parametrize("static", [True, False], ids=["static", "by token"])
@pytest.mark.parametrize("name", READS)
@torch.no_grad()
def test_depth_read(name, static):
    xs, query = sources(), torch.randn(D if static else (2, 3, D), dtype=torch.float64)
    assert few(xs)
    options = READS[name]
    found = ops.depth_read(query, xs, **options, return_weights=True)
    wanted = reference.depth_read(query, xs, **options, return_weights=True)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-12
    assert ops.depth_read(query, xs, **options).equal(found[0])


@pytest.mark.parametrize("shape", [(5,), (5, D)], ids=str)
@torch.no_grad()
def test_mix(shape):
    xs, weights = sources(), torch.randn(shape, dtype=torch.float64)
    assert error(ops.mix(xs, weights), reference.mix(xs, weights)) < 1e-12


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("by_feature", [False, True])
@torch.no_grad()
def test_gated_mix(by_feature, eps):
    xs, gate = sources(), torch.randn(3, D, dtype=torch.float64)
    weights = torch.randn(3, 5, *([D] if by_feature else []), dtype=torch.float64)
    found = ops.gated_mix(xs, weights, gate, norm_eps=eps)
    with torch.enable_grad():  # the way of training
        wanted = ops.gated_mix(xs, weights, gate, norm_eps=eps)
    assert max(error(a, b.detach()) for a, b in zip(found, wanted, strict=True)) < 1e-12


@torch.no_grad()
def test_the_result_has_the_sources_dtype():
    xs = sources(dtype=torch.bfloat16)
    exact = reference.depth_read(torch.ones(D), tuple(x.double() for x in xs))
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.depth_read(torch.ones(D), xs)
    assert found.dtype == ops.mix(xs, torch.ones(5)).dtype == torch.bfloat16
    assert error(found, exact) < 2**-8


def test_many_tokens_and_training_take_the_other_way():
    xs = sources()
    assert not few(xs)  # gradients are on
    with torch.no_grad():
        assert not few(sources((0, 3)))
        assert not few((torch.empty(CHUNK // 2 + 1),) * 2)


@pytest.mark.parametrize("lead", [(2, 3), (2, 1, 3)], ids=str)
def test_token_mix(lead):
    xs = sources(lead)
    weights = torch.randn(*lead, 4, 5, dtype=torch.float64)
    trained = ops.token_mix(xs, weights)  # gradients are on: the way of training
    wanted = reference.token_mix(xs, weights)
    with torch.no_grad():
        found = ops.token_mix(xs, weights)
    assert len(found) == 4
    assert max(error(a, b) for a, b in zip((*found, *trained), (*wanted, *wanted), strict=True)) < 1e-12
    with pytest.raises(InputError, match=r"give \(\.\.\., O, n\)"):
        ops.token_mix(xs, weights[..., :4])


@pytest.mark.parametrize("last", ["rows", "columns"])
@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
@torch.no_grad()
def test_sinkhorn_of_a_matrix_or_two(scale, last):
    R = torch.randn(1, 2, 4, 4, dtype=torch.float64) * scale
    for iterations in (0, 1, 20):
        found, wanted = (f(R, iterations, last=last) for f in (ops.sinkhorn, reference.sinkhorn))
        assert found.shape == R.shape
        assert error(found, wanted) < 1e-12


@pytest.mark.parametrize("m", [None, 3])
def test_delta_rewrite(m):
    X, h = (
        torch.randn(2, 1, D, *([m] if m else []), dtype=torch.float64),
        torch.randn(2, 1, D, dtype=torch.float64),
    )
    value, gate = torch.randn(2, 1, m or 1, dtype=torch.float64), torch.rand(2, 1, dtype=torch.float64)
    with torch.no_grad():
        found = ops.delta_rewrite(X, h, value, gate, 1e-5)
    assert error(found, reference.delta_rewrite(X, h, value, gate, 1e-5)) < 1e-12
