"""Sinkhorn's normalisations and mixes of permutations: twins, sums, order, and what is finite."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck

from twoaxis import InputError, ops

LASTS = ["rows", "columns"]


def logits(n: int = 4, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    return (scale * torch.randn(2, 3, n, n, generator=g, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1], ids="eps={}".format)
@pytest.mark.parametrize("iterations", [0, 1, 3, 20], ids="t={}".format)
def test_equals_the_reference_with_gradients(iterations: int, eps: float, last: str) -> None:
    R = logits().requires_grad_()
    cotangent = torch.randn_like(R)
    fast, plain = (f(R, iterations, last=last, eps=eps) for f in (ops.sinkhorn, ops.reference.sinkhorn))
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-14)
    ours, theirs = (torch.autograd.grad(x, R, cotangent)[0] for x in (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_gradcheck(eps: float) -> None:
    R = logits(3).requires_grad_()
    assert gradcheck(lambda x: ops.sinkhorn(x, 4, eps=eps), R)


# pitfalls, depth states: "n=4 logits drawn at scale 1, 10, 100; 0, 1, 20 iterations; fp32 and bf16; T=1 ->
# finite; the last-normalised axis sums to 1 and the other axis's error is reported, not assumed zero"
@pytest.mark.parametrize("last", LASTS)
@pytest.mark.parametrize("iterations", [0, 1, 20], ids="t={}".format)
@pytest.mark.parametrize("scale", [1, 10, 100], ids="scale={}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_finite_and_the_last_sums_are_one(
    dtype: torch.dtype, scale: int, iterations: int, last: str
) -> None:
    R = logits(4, scale, dtype)[:, :1].requires_grad_()
    H = ops.sinkhorn(R, iterations, last=last)
    assert H.dtype == torch.float32
    H.square().sum().backward()
    assert H.isfinite().all()
    assert R.grad is not None
    assert R.grad.isfinite().all()
    errors = dict(zip(LASTS, ops.sinkhorn_error(H), strict=True))
    assert errors.pop(last) < 1e-5
    assert errors.popitem()[1] > 1e-6 or (scale, iterations) == (1, 20)


def test_error_of_the_other_axis_shrinks_with_iterations() -> None:
    R = logits(4, 2.0)
    columns = [ops.sinkhorn_error(ops.sinkhorn(R, t))[1].item() for t in (0, 1, 3, 20, 200)]
    assert columns == sorted(columns, reverse=True)
    assert columns[1] > 0.1
    assert columns[-1] < 1e-3


def test_the_order_is_columns_then_rows() -> None:
    """The paper's M_t = RowNorm(ColNorm(M_t-1)), written out for two iterations."""
    M = logits().exp()
    for _ in range(2):
        M = M / M.sum(-2, keepdim=True)
        M = M / M.sum(-1, keepdim=True)
    torch.testing.assert_close(ops.sinkhorn(logits(), 2), M, rtol=1e-13, atol=0)
    torch.testing.assert_close(ops.sinkhorn(logits().mT, 2, last="columns"), M.mT, rtol=1e-13, atol=0)
    assert not torch.allclose(ops.sinkhorn(logits(), 2, last="columns"), M)


def test_identities_of_doubly_stochastic_matrices() -> None:
    H = ops.sinkhorn(logits(), 400)
    product = H[0, 0] @ H[1, 2]
    assert max(ops.sinkhorn_error(product)) < 1e-12
    assert torch.linalg.matrix_norm(H, 2).max() < 1 + 1e-12
    assert torch.equal(ops.sinkhorn(torch.full((3, 1, 1), -7.0)), torch.ones(3, 1, 1))  # n = 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_permutation_mix_is_exactly_doubly_stochastic(n: int) -> None:
    P = ops.permutation_matrices(n)
    orders = list(itertools.permutations(range(n)))
    assert P.shape == (len(orders), n, n)
    for matrix, order in zip(P, orders, strict=True):
        assert all(matrix[i, j] == 1 for i, j in enumerate(order))
    r = torch.randn(2, 5, len(orders), dtype=torch.float64)
    H = ops.permutation_mix(10 * r, P)
    assert max(ops.sinkhorn_error(H)) < 1e-14
    assert (H >= 0).all()
    r[..., -1] = 1000.0  # the last permutation alone: the reversal
    torch.testing.assert_close(ops.permutation_mix(r, P), P[-1].double().expand(2, 5, n, n))
    assert ops.permutation_mix(r.bfloat16(), P).dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 0, 2, 2)])
def test_no_matrices(shape: tuple[int, ...]) -> None:
    R = torch.empty(shape, requires_grad=True)
    H = ops.sinkhorn(R)
    assert H.shape == shape
    H.sum().backward()


def test_double_backward_needs_the_reference() -> None:
    R = logits().requires_grad_()
    (g,) = torch.autograd.grad(ops.reference.sinkhorn(R, 3).square().sum(), R, create_graph=True)
    g.sum().backward()
    with pytest.raises(RuntimeError, match=r"ops\.reference"):
        torch.autograd.grad(ops.sinkhorn(R, 3).square().sum(), R, create_graph=True)


@pytest.mark.parametrize("sinkhorn", [ops.sinkhorn, ops.reference.sinkhorn], ids=["fast", "reference"])
@pytest.mark.parametrize(
    ("shape", "given"),
    [((2, 3), {}), ((3,), {}), ((3, 3), {"iterations": -1}), ((3, 3), {"iterations": True}),
     ((3, 3), {"last": "rows first"}), ((3, 3), {"eps": -1.0}), ((3, 3), {"eps": float("nan")})],
)  # fmt: skip
def test_refuses(sinkhorn, shape, given) -> None:
    with pytest.raises(InputError) as error:
        sinkhorn(torch.zeros(shape), **given)
    assert "\n" not in str(error.value)
