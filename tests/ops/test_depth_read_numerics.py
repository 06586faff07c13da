"""depth_read in numbers: precision, memory layout, what it keeps, what flows back."""

import pytest
import torch
from agreement import error, results, rounded_once
from read_cases import LEAD, call, case, randn
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from twoaxis.ops import depth_read, reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_low_precision(dtype):
    """Float32 inside, one cast."""
    leaves, rest = case("token gain normed", 5, 24, (3, 50))
    inputs = [x.to(dtype) for x in (*leaves.values(), *(randn(3, 50, 24) for _ in range(5)))]
    found = results(call(depth_read, leaves, rest, 5), inputs)
    exact = results(call(reference.depth_read, leaves, rest, 5), [x.double() for x in inputs])
    rounded_once(found, exact)


def test_mixed_dtypes_are_promoted_once():
    sources = [randn(*LEAD, 6, dtype=torch.bfloat16), randn(*LEAD, 6, dtype=torch.float32)]
    for read in (depth_read, reference.depth_read):
        assert read(randn(6, dtype=torch.float32), sources).dtype == torch.float32


def test_autocast_does_not_touch_the_read():
    leaves, rest = case("token gain normed", 3, 24, dtype=torch.float32)
    inputs = [*leaves.values(), *(randn(*LEAD, 24, dtype=torch.float32) for _ in range(3))]
    f = call(depth_read, leaves, rest, 3)
    plain = results(f, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        inside = results(f, inputs)
    assert all(one.equal(other) for one, other in zip(inside, plain, strict=True))


def test_any_memory_layout():
    """Pitfall: the depth stack as transposed, strided, expanded, sliced views -> equal to copies."""
    stack = randn(4, 5, 2, 12)
    sources = [
        stack[0].transpose(0, 1)[..., ::2],
        stack[1].transpose(0, 1)[..., 3:9],
        stack[2, 0, 0, :6].expand(2, 5, 6),
        stack[3].permute(1, 0, 2)[..., :6],
    ]
    for name in ("static gain normed", "token raw"):
        leaves, rest = case(name, 4, 6)
        f = call(depth_read, leaves, rest, 4)
        odd, plain = (
            results(f, [*leaves.values(), *xs]) for xs in (sources, [x.contiguous() for x in sources])
        )
        assert all(error(a, b) < 1e-14 for a, b in zip(odd, plain, strict=True))
    query, *leaf = (x.requires_grad_() for x in (randn(6), *(x.contiguous() for x in sources)))
    grads = [
        torch.autograd.grad(read(query, leaf).sum(), [query, *leaf])
        for read in (depth_read, reference.depth_read)
    ]
    assert all(error(a, b) < 1e-14 for a, b in zip(*grads, strict=True))  # an expanded cotangent


def test_only_some_sources_need_gradients():
    """Pitfall: only the listed states need grad, not the direct input -> each gets its gradient."""
    query, fixed, wanted = randn(6), randn(*LEAD, 6), randn(*LEAD, 6).requires_grad_()
    out = depth_read(query, (fixed, wanted))
    assert out.requires_grad
    (grad,) = torch.autograd.grad(out.sum(), wanted)
    (plain,) = torch.autograd.grad(reference.depth_read(query, (fixed, wanted)).sum(), wanted)
    assert error(grad, plain) < 1e-14


@pytest.mark.parametrize("name", ["static gain normed bias", "token scale"])
def test_gradcheck(name):
    leaves, rest = case(name, 3, 4, (2,))
    inputs = [x.requires_grad_() for x in (*leaves.values(), *(randn(2, 4) for _ in range(3)))]
    assert gradcheck(call(depth_read, leaves, rest | {"heads": 2}, 3), inputs)


def test_second_derivatives_are_refused_aloud():
    query, source = (x.requires_grad_() for x in (randn(6), randn(*LEAD, 6)))
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(depth_read(query, (source, source)).sum(), source, create_graph=True)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_beside_the_sources_a_read_keeps_scalars_per_token(dtype, heads):
    """O(n) numbers per token and source: a dot product per head and the norm factor, in float32."""
    for n in (2, 8):
        sources = [randn(2, 64, 32, dtype=dtype).requires_grad_() for _ in range(n)]
        own = {x.data_ptr() for x in sources}
        kept: dict[int, int] = {}

        def pack(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            gains = [randn(32).requires_grad_() for _ in range(3)]
            depth_read(
                gains[0], sources, key_gain=gains[1], output_gain=gains[2], output_eps=1e-6, heads=heads
            )
        beside = sum(size for at, size in kept.items() if at not in own)
        parameters = sum(x.numel() * x.element_size() for x in gains)
        assert beside == n * 2 * 64 * (heads + 1) * 4 + parameters
