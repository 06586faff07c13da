"""mix: a weighted sum of states, against the plain one."""

import pytest
import torch
from agreement import agree, error, results, rounded_once
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from twoaxis.errors import InputError
from twoaxis.ops import mix, reference

FORMS = ["scalars", "features", "tokens", "token columns", "loose scalars"]


def weights(form: str, n: int, lead: tuple[int, ...], d: int, dtype=torch.float64):
    """Weight tensors, and how to hand them over."""
    if form in ("scalars", "features"):
        return [torch.randn((n,) if form == "scalars" else (n, d), dtype=dtype)], lambda w: w[0]
    shape = {"tokens": lead, "token columns": (*lead, 1), "loose scalars": ()}[form]
    return [torch.randn(shape, dtype=dtype) for _ in range(n)], list


def call(f, pack, n):
    return lambda *tensors: f(tensors[-n:], pack(tensors[:-n]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lead", [(2, 5), (), (1,), (3, 2, 2), (0, 4), (2, 0)], ids=str)
def test_equals_the_reference(form, lead):
    for n in (1, 2, 7):
        for d in (1, 3, 33):
            ws, pack = weights(form, n, lead, d)
            inputs = [*ws, *(torch.randn(*lead, d, dtype=torch.float64) for _ in range(n))]
            agree(call(mix, pack, n), call(reference.mix, pack, n), inputs, 1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_rounded_once(form, monkeypatch):
    """Weights in float32, as they are learned; 300 tokens are cut into chunks."""
    monkeypatch.setattr("twoaxis.ops.precision.CHUNK", 1 << 10)
    ws, pack = weights(form, 6, (3, 100), 24, torch.float32)
    inputs = [*ws, *(torch.randn(3, 100, 24, dtype=torch.bfloat16) for _ in range(6))]
    found, exact = (
        results(call(f, pack, 6), xs)
        for f, xs in ((mix, inputs), (reference.mix, [x.double() for x in inputs]))
    )
    rounded_once(found, exact)


def test_the_order_of_sources_is_that_of_weights():
    sources = [torch.full((2, 3), 10.0**j) for j in range(3)]
    assert mix(sources, torch.tensor([3.0, 2.0, 1.0]))[0, 0] == 123


def test_saves_sources_and_weights_alone():
    sources = [torch.randn(2, 5, 6, dtype=torch.bfloat16).requires_grad_() for _ in range(4)]
    w = torch.randn(4, requires_grad=True)
    kept: set[int] = set()
    with saved_tensors_hooks(lambda x: (kept.add(x.untyped_storage().data_ptr()), x)[1], lambda x: x):
        mix(sources, w)
    assert kept == {x.data_ptr() for x in (*sources, w)}


def test_autocast_and_layout():
    """Pitfall: transposed, strided, expanded and sliced views -> equal to contiguous copies."""
    stack = torch.randn(5, 2, 12)
    odd = [stack.transpose(0, 1)[..., ::2], stack.transpose(0, 1)[..., 3:9], stack[0, 0, :6].expand(2, 5, 6)]
    w = torch.randn(3)
    plain = results(lambda w, *x: mix(x, w), [w, *(x.contiguous() for x in odd)])
    with torch.autocast("cpu", torch.bfloat16):
        found = results(lambda w, *x: mix(x, w), [w, *odd])
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form):
    ws, pack = weights(form, 3, (2,), 4)
    inputs = [x.requires_grad_() for x in (*ws, *(torch.randn(2, 4, dtype=torch.float64) for _ in range(3)))]
    assert gradcheck(call(mix, pack, 3), inputs)


def test_second_derivatives_are_refused_aloud():
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(1, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(mix((x,), w).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3), r"weights \(3,\)"),
        (torch.zeros(2, 5), r"weights \(2, 5\)"),
        ([torch.zeros(2, 4)], "1 weights for 2 sources"),
        ([torch.zeros(2), torch.zeros(2)], r"weight \(2,\)"),
    ],
    ids=["count", "features", "one", "tokens"],
)
def test_bad_weights_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        mix((torch.zeros(2, 4, 6),) * 2, given)
