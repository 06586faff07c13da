"""Tensors kept in fewer bits: their error, per token, and gradients that go straight through."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from twoaxis.depth.stored import STORED_DTYPES, Stored, plain_parts, store
from twoaxis.ops import depth_read, gated_mix, head_mix, mix

SHAPES = [(2, 5, 7), (1, 3, 4, 5), (3, 1, 1)]


def value(x: torch.Tensor) -> torch.Tensor:
    assert isinstance(x, Stored)
    return x.value()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from(SHAPES), st.floats(-30, 30))
def test_int8_is_within_half_a_step_of_its_token(seed: int, shape: tuple[int, ...], power: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10**power
    step = x.abs().amax(tuple(range(2, x.ndim)), keepdim=True) / 127
    kept = store(x, "int8")
    assert ((value(kept) - x).abs() <= step * (0.5 + 1e-12)).all()
    parts = plain_parts(kept)
    assert {name: (p.dtype, p.shape) for name, p in parts.items()} == {
        "": (torch.int8, x.shape),
        ".scale": (torch.float64, step.shape),
    }
    torch.testing.assert_close(parts[".scale"], step, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_one_cast(dtype: str) -> None:
    x = torch.randn(2, 3, 5)
    kept = store(x, dtype)
    assert torch.equal(value(kept), x.to(getattr(torch, dtype)).float())
    assert [p.dtype for p in plain_parts(kept).values()] == [getattr(torch, dtype)]


@pytest.mark.parametrize("dtype", STORED_DTYPES)
@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_outwardly_it_is_what_it_was_made_from(dtype: str, outer: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, dtype=outer)
    kept = store(x, dtype)
    assert (kept.shape, kept.dtype, value(kept).dtype, (kept + 0).dtype) == (x.shape, outer, outer, outer)
    assert type(kept + 0) is torch.Tensor


@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_a_token_is_kept_by_itself(dtype: str) -> None:
    # what makes decoding equal to training: no token's scale depends on another's
    x = torch.randn(2, 6, 5)
    whole, parts = value(store(x, dtype)), [value(store(x[:, t : t + 1], dtype)) for t in range(6)]
    assert torch.equal(whole, torch.cat(parts, 1))


def test_zeros_stay_and_what_is_not_finite_shows() -> None:
    x = torch.ones(1, 4, 3)
    x[0, 0], x[0, 1, 2], x[0, 2, 1] = 0.0, torch.nan, torch.inf
    kept = value(store(x, "int8"))
    assert torch.equal(kept[0, [0, 3]], x[0, [0, 3]])
    assert not kept[0, 1].isfinite().any()
    assert not kept[0, 2].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)], ids=["B=0", "T=0"])
@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_nothing_to_keep(shape: tuple[int, ...], dtype: str) -> None:
    assert value(store(torch.empty(shape), dtype)).shape == shape


READS = {
    "depth_read": lambda q, *v: depth_read(q, v),
    "heads": lambda q, *v: depth_read(q, v, heads=2, output_gain=q, output_eps=1e-6),
    "mix": lambda q, *v: mix(v, torch.stack((q, 2 * q))),
    "gated_mix": lambda q, *v: gated_mix(v, torch.ones(1, 2), q[None])[0],
    "sum": lambda q, *v: (v[0] + q * v[1]).square(),
    "linear": lambda q, *v: F.linear(v[0], q[None]) * v[1],
    "head_mix": lambda q, *v: head_mix(v, torch.cat((q, 2 * q))[None], (5,))[0],
    "views": lambda q, *v: v[0].split((2, 4), -1)[1].reshape(-1, 2) * v[1][..., 2:].reshape(-1, 2) * q[0],
    "merged": lambda q, *v: (v[0].reshape(-1) * v[1].transpose(1, 2).reshape(-1)).sum() * q,
}


@pytest.mark.parametrize("dtype", STORED_DTYPES)
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "checkpointed"])
def test_gradients_are_those_of_the_values(dtype: str, read: object, recompute: bool) -> None:
    """The unquantised read's formula at the stored values; to the source it passes unchanged, in its own dtype."""
    q, *sources = (torch.randn(s, dtype=torch.float64) for s in (6, (2, 5, 6), (2, 5, 6)))
    results = []
    for keep in (True, False):
        x = [(s if keep else value(store(s, dtype))).detach().requires_grad_() for s in (sources)]
        w = q.clone().requires_grad_()
        seen = [store(s, dtype) if keep else s for s in x]
        out = checkpoint(read, w, *seen, use_reentrant=False) if recompute else read(w, *seen)
        out.square().sum().backward()
        results.append((out, w.grad, *(s.grad for s in x)))
    for kept, plain in zip(*results, strict=True):
        assert type(kept.detach()) is torch.Tensor
        torch.testing.assert_close(kept, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", STORED_DTYPES)
def test_copies_and_leaves(dtype: str) -> None:
    kept = store(torch.randn(2, 3, 5), dtype)
    for other in (copy.deepcopy(kept), kept.clone(), kept.detach(), kept.rebuilt(torch.clone)):
        assert isinstance(other, Stored)
        assert torch.equal(value(other), value(kept))
        assert "scale" not in repr(other)
    leaf = kept.clone().requires_grad_()
    (leaf * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3, 5), 3.0))
