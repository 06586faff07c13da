"""The kernels on several streams against the references in float64, and when they are used."""

import pytest
import torch
from agreement import error, results
from native_cases import needs_kernel
from test_streams import cases

pytestmark = [needs_kernel("streams"), needs_kernel("stream_scores")]


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("d", [24, 33, 344])
@pytest.mark.parametrize("lead", [(1,), (33,), (129,), (3, 43), (0, 4)], ids=str)
def test_equals_the_reference(lead, d, dtype, counting):
    libraries = counting("streams"), counting("stream_scores")
    for (fast, plain), inputs in cases(lead, 4, d, dtype):
        found = results(fast, inputs)
        exact = results(plain, [x.double() for x in inputs])
        for one, other in zip(found, exact, strict=True):
            assert error(one, other) <= 1e-5 + torch.finfo(one.dtype).eps / 2
    calls = [len(library.calls) for library in libraries]
    assert calls == (
        [0, 0] if 0 in lead else [10, 2]
    )  # joint scores, channels and streams without mixing are plain


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_numbers_of_streams(n):
    for (fast, plain), inputs in cases((5,), n, 7, torch.float32):
        found, exact = results(fast, inputs), results(plain, [x.double() for x in inputs])
        assert max(error(a, b) for a, b in zip(found, exact, strict=True)) < 1e-5


def test_any_layout_of_inputs_and_gradients():
    for (fast, plain), inputs in cases((4, 3), 3, 12, torch.float32):
        odd = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x for x in inputs]
        leaves = [x.requires_grad_() for x in odd]
        out, wanted = fast(*leaves), plain(*leaves)
        for cotangent in (torch.ones(1).expand(out.shape), torch.randn_like(wanted.mT).mT):
            found = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
            expected = torch.autograd.grad(wanted, leaves, cotangent, retain_graph=True)
            assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_a_wider_branch_is_added_plainly(counting):
    from twoaxis.ops import stream_write

    library = counting("streams")
    X = torch.randn(3, 2, 6).bfloat16()
    stream_write(X, torch.randn(3, 2, 2), torch.randn(3, 2), torch.randn(3, 6))
    assert library.calls == []
    stream_write(X, torch.randn(3, 2, 2), torch.randn(3, 2), torch.randn(3, 6).bfloat16())
    assert library.calls == ["streams_run"]
