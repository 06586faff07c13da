"""Linear maps: the same function in either order of the product, and without bfloat16 units."""

import pytest
import torch
from torch import nn

from twoaxis.linear import Linear, linear


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 5), (1, 16), (4, 16), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_is_a_linear_layer(shape, dtype, grad):
    layer = Linear(6, 9).to(dtype)
    x = torch.randn(*shape, 12, dtype=dtype)[..., ::2]  # strided
    with torch.set_grad_enabled(grad):
        found = layer(x)
    expected = nn.functional.linear(x, layer.weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected.detach() if not grad else expected)


def test_starts_as_torch_starts_it():
    torch.manual_seed(3)
    ours = Linear(6, 9)
    torch.manual_seed(3)
    assert ours.weight.equal(nn.Linear(6, 9, bias=False).weight)
    assert ours.bias is None


def composed(x, weight, bias=None):
    """A bfloat16 product in plain PyTorch: float32 sums of bfloat16 numbers, rounded once."""
    y = nn.functional.linear(x.bfloat16().float(), weight.bfloat16().float()).bfloat16()
    return y if bias is None else y + bias.bfloat16()


def product(kind, shape=(2, 3), bias=False):
    """x (*shape, 5), a weight (7, 5) and a bias (7,) in the dtypes of a kind of bfloat16 product."""
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 10)[..., ::2], torch.randn(7, 5)  # x strided
    b = torch.randn(7) if bias else None
    if kind == "bfloat16":
        x, weight, b = x.bfloat16(), weight.bfloat16(), None if b is None else b.bfloat16()
    given = [t.detach().requires_grad_() for t in (x, weight, b) if t is not None]
    return given, torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")


@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3), (33,), (2, 1, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_bfloat16_product_without_units(monkeypatch, kind, shape, bias):
    """The same numbers and dtypes as torch's bfloat16 product, and all gradients, of an expanded one too."""
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", False)
    given, context = product(kind, shape, bias)
    with context:
        found, torchs = linear(*given), nn.functional.linear(*given)
    expected = composed(*given)
    if not bias and 0 not in shape:
        assert type(found.grad_fn).__name__ == "_WidenedBackward"
    assert found.dtype == torchs.dtype == torch.bfloat16
    assert found.shape == torchs.shape
    assert found.equal(expected)
    gradient = torch.linspace(-1, 1, 7).bfloat16().expand(found.shape)
    of_found = torch.autograd.grad(found, given, gradient)
    of_torchs = torch.autograd.grad(torchs, given, gradient)
    for ours, theirs, one in zip(of_found, of_torchs, given, strict=True):
        assert ours.dtype == theirs.dtype == one.dtype
        torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=1e-2)


def test_a_bfloat16_product_keeps_no_copies(monkeypatch):
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", False)
    (x, weight), _ = product("bfloat16")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), weight.data_ptr()]


def test_a_bfloat16_product_twice_differentiated(monkeypatch):
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", False)
    (x, weight), _ = product("bfloat16")

    def second(f):
        (gx,) = torch.autograd.grad(f(x, weight).float().pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(gx.float().pow(3).sum(), (x, weight))

    for found, expected in zip(second(linear), second(composed), strict=True):
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-1)


@pytest.mark.parametrize("case", ["units", "one row", "float64", "float32", "float16 autocast"])
def test_other_products_are_torchs_own(monkeypatch, case):
    """Where torch has units, where the weight's bytes decide, and where the product is not bfloat16."""
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", case == "units")
    (x, weight), context = product(
        "bfloat16" if case == "units" else "autocast", (1,) if case == "one row" else (2, 3)
    )
    if case in ("float64", "float32"):
        dtype = getattr(torch, case)
        x, weight = x.to(dtype), weight.to(dtype)
        context = torch.autocast("cpu", torch.bfloat16, enabled=case == "float64")
    elif case == "float16 autocast":
        context = torch.autocast("cpu", torch.float16)
    with context:
        found, expected = linear(x, weight), nn.functional.linear(x, weight)
    assert "_Widened" not in type(found.grad_fn).__name__
    assert found.dtype == expected.dtype
    assert found.equal(expected)


def test_a_bfloat16_product_in_one_graph(monkeypatch):
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", False)
    (x, weight), context = product("autocast")
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    with context:
        found, expected = compiled(x, weight), linear(x, weight)
    assert found.equal(expected)
    of_found, of_expected = (torch.autograd.grad(y.sum(), (x, weight)) for y in (found, expected))
    for ours, theirs in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-2, atol=0
        )  # the graph rounds gradients as torch does


@pytest.mark.parametrize("case", ["float32 weight", "float32 bias", "float64 weight", "integers"])
def test_what_torch_refuses_is_refused_without_units(monkeypatch, case):
    """Numbers of two dtypes that autocast does not make one are a mistake on every machine."""
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", False)
    (x, weight, bias), _ = product("bfloat16", bias=True)
    x, weight, bias = {
        "float32 weight": (x, weight.float(), None),
        "float32 bias": (x, weight, bias.float()),
        "float64 weight": (x.float(), weight.double(), None),
        "integers": (x.long(), weight.float(), None),
    }[case]
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case in ("float64 weight", "integers")),
        pytest.raises(RuntimeError, match="same dtype"),
    ):
        linear(x, weight, bias)


def test_a_bfloat16_product_under_function_transforms(monkeypatch):
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", False)
    (x, weight), _ = product("bfloat16")
    assert torch.vmap(lambda a: linear(a, weight))(x).equal(composed(x, weight))
    found = torch.func.grad(lambda a: linear(a, weight).float().sum())(x)
    (expected,) = torch.autograd.grad(composed(x, weight).float().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.fixture
def units(monkeypatch):
    """As on a CPU that multiplies bfloat16; the products here are torch's emulated ones."""
    monkeypatch.setattr("twoaxis.linear.BF16_UNITS", True)


@pytest.mark.parametrize("backend", ["plain", "native"])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_the_weight_s_gradient_from_a_transposed_copy(units, monkeypatch, kind, backend):
    """The same result and gradients as torch's, of expanded and strided gradients too."""
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    for shape in ((64,), (2, 40), (3, 1, 33)):
        (x, weight), context = product(kind, shape)
        with context:
            found, expected = linear(x, weight), nn.functional.linear(x, weight)
        assert type(found.grad_fn).__name__ == "_TurnedBackward"
        assert found.dtype == torch.bfloat16
        assert found.equal(expected)
        cotangents = (
            torch.linspace(-1, 1, 7).bfloat16().expand(found.shape),
            torch.randn(*shape, 14)[..., ::2].bfloat16(),
        )
        for g in cotangents:
            ours, again, theirs = (
                torch.autograd.grad(y, (x, weight), g, retain_graph=True) for y in (found, found, expected)
            )
            for one, two, other in zip(ours, again, theirs, strict=True):
                assert one.dtype == other.dtype
                assert one.equal(two)
                torch.testing.assert_close(one, other, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("case", ["few rows", "no grad", "frozen weight", "bias", "float32"])
def test_other_products_with_units_are_torchs_own(units, case):
    (x, weight, bias), context = product("autocast", (3,) if case == "few rows" else (70,), bias=True)
    if case == "frozen weight":
        weight.requires_grad_(False)
    with torch.set_grad_enabled(case != "no grad"):
        if case == "float32":
            found = linear(x, weight)
        else:
            with context:
                found = linear(x, weight, bias if case == "bias" else None)
    assert "_Turned" not in type(found.grad_fn).__name__


def test_a_product_with_units_twice_differentiated_transformed_and_in_one_graph(units):
    (x, weight), _ = product("bfloat16", (64,))

    def second(f):
        (gx,) = torch.autograd.grad(f(x, weight).float().pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(gx.float().pow(3).sum(), (x, weight))

    for found, expected in zip(second(linear), second(composed), strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=1)
    torch.func.grad(lambda a: linear(a, weight).float().sum())(x)
    assert torch.vmap(lambda a: linear(a, weight))(x.unsqueeze(0)).shape == (1, 64, 7)
    graph = torch.compile(linear, fullgraph=True, backend="aot_eager")(x, weight)
    assert graph.equal(nn.functional.linear(x, weight))
