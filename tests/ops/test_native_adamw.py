"""The kernel of AdamW's update against the paper's equations in float64 and torch's fused step."""

import pytest
import torch
from native_cases import needs_kernel
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from twoaxis.ops import choice, reference
from twoaxis.ops.native import adamw

pytestmark = needs_kernel("adamw")
SIZES = [(0,), (1,), (5,), (33, 7), (16,), (24, 3), (3, 5, 67), (adamw.PIECE + 3,), (2 * adamw.PIECE,)]
BETAS, EPS = (0.9, 0.95), 1e-8


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def numbers(shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part_of(shape, half=True, step=1, **fields):
    grad = numbers(shape, 2, 0.1)
    given = {
        "weight": numbers(shape, 0),
        "grad": grad.bfloat16() if half else grad,
        "exp_avg": numbers(shape, 3, 0.05),
        "exp_avg_sq": numbers(shape, 4, 0.1).square(),
        "rounded": torch.zeros(shape, dtype=torch.bfloat16) if half else None,
        "step": step,
        "lr": 1e-2,
        "decay": 0.1,
    }
    return adamw.Part(**given | fields)


def updated(*parts, scale=1.0):
    lib = adamw.library([part.weight for part in parts])
    return adamw.update(lib, parts, BETAS, EPS, scale)


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_update_is_the_papers(half, threads, monkeypatch):
    monkeypatch.setattr(adamw, "threads", lambda: threads)
    parts = [part_of(shape, half, step=1 + 3 * i, decay=i % 2 * 0.1) for i, shape in enumerate(SIZES)]
    how = {"betas": BETAS, "eps": EPS}
    exact = [
        reference.adamw(
            p.weight.double(), 0.37 * p.grad.double(), p.exp_avg.double(), p.exp_avg_sq.double(), p.step,
            lr=p.lr, decay=p.decay, **how,
        )
        for p in parts
    ]  # fmt: skip
    assert updated(*parts, scale=0.37)
    for part, wanted in zip(parts, exact, strict=True):
        found = (part.weight, part.exp_avg, part.exp_avg_sq)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-7)
        if half:
            assert part.rounded.equal(part.weight.bfloat16())


def test_fifty_updates_are_torchs():
    for shape in SIZES[:-1]:
        ours, theirs = nn.Parameter(numbers(shape, 0)), nn.Parameter(numbers(shape, 0))
        torchs = torch.optim.AdamW([theirs], lr=1e-2, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True)
        moments = torch.zeros(shape), torch.zeros(shape)
        for step in range(1, 51):
            theirs.grad = numbers(shape, step, 0.1)
            lr = torchs.param_groups[0]["lr"] = 1e-2 / step
            torchs.step()
            assert updated(adamw.Part(ours, theirs.grad, *moments, None, step, lr, 0.1))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        state = torchs.state[theirs]
        for a, b in zip(moments, (state["exp_avg"], state["exp_avg_sq"]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("beta1", [0.0, 0.25, 0.75])
def test_a_short_memory_forgets_large_moments(beta1):
    """With beta1 = 0 the first moment is the gradient, whatever it was before."""
    part = part_of((37,), half=False, step=2, exp_avg=numbers((37,), 1, 1e6))
    exact = beta1 * part.exp_avg.double() + (1 - beta1) * part.grad.double()
    library = adamw.library([part.weight])
    assert library is not None
    assert adamw.update(library, [part], (beta1, 0.9), EPS, 1.0)
    torch.testing.assert_close(part.exp_avg.double(), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("size", [1, 40])
def test_what_is_no_number_goes_where_torch_puts_it(size):
    """Into the same places; and a NaN is rounded to a NaN."""
    inf, nan = float("inf"), float("nan")
    odd = torch.tensor([0.0, -0.0, 1e-45, 1e30, -inf, inf, nan, -3.0])[:size].repeat(5)[:size]
    for scale in (1.0, 0.0, nan):
        part = part_of((size,), grad=odd.bfloat16())
        theirs = nn.Parameter(part.weight.clone())
        torchs = torch.optim.AdamW([theirs], lr=part.lr, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True)
        moments = {"exp_avg": part.exp_avg.clone(), "exp_avg_sq": part.exp_avg_sq.clone()}
        torchs.state[theirs] = {"step": torch.zeros(()), **moments}
        theirs.grad = odd.bfloat16().float() * scale
        torchs.step()
        assert updated(part, scale=scale)
        torch.testing.assert_close(part.weight, theirs.detach(), rtol=1e-6, atol=1e-7, equal_nan=True)
        assert part.rounded.isnan().equal(part.weight.isnan())
        whole = ~part.weight.isnan()
        assert part.rounded[whole].equal(part.weight.bfloat16()[whole])


def test_the_copy_is_rounded_to_nearest_even():
    bits = torch.arange(-(2**31), 2**31, 99_991, dtype=torch.int64).int()
    ties = (bits & -65536) | 0x8000
    weight = torch.cat([bits, ties]).view(torch.float32)
    still = torch.zeros_like(weight)
    part = part_of(weight.shape, weight=weight, exp_avg=still, exp_avg_sq=still.clone(), decay=0.0)
    assert updated(part._replace(grad=still.bfloat16()))
    assert part.rounded.isnan().equal(weight.isnan())  # of which torch itself writes several
    found, wanted = (x[~weight.isnan()].view(torch.int16) for x in (part.rounded, weight.bfloat16()))
    assert found.equal(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_norm_is_that_of_all_and_of_any_number_of_threads(dtype, monkeypatch):
    grads = [numbers(shape, i).to(dtype) for i, shape in enumerate(SIZES)] + [numbers((9,), 99)]
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(adamw, "threads", lambda n=threads: n)
        found.append(adamw.norm(grads))
    assert found[0] == found[1] == found[2]
    torch.testing.assert_close(found[0], exact, rtol=1e-7, atol=0)
    assert adamw.norm([torch.tensor([float("inf")]), torch.zeros(3)]).isinf()
    assert adamw.norm([torch.tensor([float("nan")]), torch.zeros(3)]).isnan()
    assert adamw.norm([torch.zeros(0)]) == 0


REFUSED = {
    "gradient across": {"grad": torch.zeros(4, 6, dtype=torch.bfloat16).T},
    "gradient of another shape": {"grad": torch.zeros(4, 6)},
    "gradient in float64": {"grad": torch.zeros(6, 4, dtype=torch.float64)},
    "expanded gradient": {"grad": torch.zeros(()).expand(6, 4)},
    "sparse gradient": {"grad": torch.zeros(6, 4).to_sparse()},
    "gradient elsewhere": {"grad": torch.zeros(6, 4, device="meta")},
    "weight in a view": {"weight": torch.zeros(6, 8)[:, ::2]},
    "moment in bfloat16": {"exp_avg": torch.zeros(6, 4, dtype=torch.bfloat16)},
    "moment across": {"exp_avg_sq": torch.zeros(4, 6).T},
    "copy in float32": {"rounded": torch.zeros(6, 4)},
    "copy across": {"rounded": torch.zeros(4, 6, dtype=torch.bfloat16).T},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_the_kernel_does_not_have_is_left_alone(change):
    good, bad = part_of((6, 4)), part_of((6, 4), **change)
    before = [x.clone() for x in good[:5]]
    assert not updated(good, bad)
    assert all(a.equal(b) for a, b in zip(before, good[:5], strict=True))


def test_who_gets_no_kernel(monkeypatch):
    weights = [torch.zeros(3), torch.zeros(3, dtype=torch.float64)]
    assert adamw.library(weights) is None
    assert adamw.library([]) is None
    assert adamw.library([torch.zeros(3, device="meta")]) is None
    assert adamw.norm([]) is None
    assert adamw.norm(weights) is None
    assert adamw.norm([torch.zeros(4, 3).T]) is None
    assert adamw.library(weights[:1]) is not None
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    assert adamw.library(weights[:1]) is adamw.norm(weights[:1]) is None


def test_views_side_by_side_are_written_and_nothing_beside_them():
    around = torch.zeros(3, 40)
    part = part_of((33,), weight=around[1, 3:36])
    assert updated(part)
    assert around[1, 3:36].all()
    assert around.count_nonzero() == 33


def test_a_graph_from_before_an_update_is_not_gone_back_over():
    part = part_of((6,), weight=nn.Parameter(numbers((6,), 0)))
    out = part.weight.square().sum()
    assert updated(part)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_observers_of_torchs_operations_see_them():
    with FlopCounterMode(display=False):
        assert adamw.library([torch.zeros(3)]) is None
    assert choice.library("adamw") is not None
