"""The kernel of gates against the references in float64, and when it is used."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from test_stream_gates import both, cases

from twoaxis import Decoder, ModelConfig
from twoaxis.ops import choice, hyper_gates, mhc_gates, reference
from twoaxis.ops.native import stream_gates

pytestmark = needs_kernel("stream_gates")


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lead", [(1,), (33,), (3, 43), (0, 4)], ids=str)
def test_equals_the_reference(lead, n, dtype, counting):
    library = counting("stream_gates")
    for f, plain, inputs in cases(lead, n, dtype):
        for a, b in both(f, plain, inputs):
            assert error(a, b) <= 1e-5 + torch.finfo(a.dtype).eps / 2
    assert len(library.calls) == (0 if 0 in lead else 16)


def test_numbers_near_zero_and_far_from_it():
    x = torch.cat((torch.logspace(-30, 30, 121), torch.zeros(1)))
    x = torch.cat((x, -x)).view(-1, 1, 1).expand(-1, 1, 3)
    unit, none = torch.ones(()), torch.zeros(1, 3)
    found = hyper_gates(x, none, unit, unit)[0]
    torch.testing.assert_close(found.double(), x[..., 0].double().tanh(), rtol=5e-7, atol=0)
    P, Q, _ = mhc_gates(x[:, 0, :2], torch.ones(2), torch.zeros(2), 1)
    torch.testing.assert_close(P.double(), x[:, :1, 0].double().sigmoid(), rtol=5e-7, atol=1e-37)
    assert torch.equal(Q, 2 * P)


def test_logits_far_apart():
    """Up to 39 by numbers; beyond 40, and for one token alone, by torch's logarithms."""
    runs = [lambda *x, f=f: f(*x, 4) for f in (mhc_gates, reference.mhc_gates)]
    z, a, b = torch.randn(43, 24).clamp(-1, 1), torch.tensor([1.0, 1.0, 19.5]), torch.zeros(24)
    assert max(error(x, y) for x, y in both(*runs, (z, a, b))) < 1e-5
    z[41, 9:12] = torch.tensor([5.0, -5.0, 1e3])
    found = list(both(*runs, (z, a, b)))
    with choice.requesting("plain"):
        plain = list(both(*runs, (z, a, b)))
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(found, plain, strict=True))
    assert all(x.isfinite().all() for x, _ in found)


@pytest.mark.parametrize("iterations", [0, 1, 20])
@pytest.mark.parametrize("last", ["rows", "columns"])
@pytest.mark.parametrize("n", [3, 4])
def test_gradients_of_which_most_cancels(n, last, iterations):
    """As at the start of training: H is next to the identity, and of streams nearly alike a row's numbers are, too."""
    given = torch.ones(3), torch.cat((torch.zeros(2 * n), 8 * (torch.eye(n) - 1).flatten()))
    z, G = torch.randn(37, 2 * n + n * n) / 100, torch.randn(37, n, 1) + torch.randn(37, n, n) / 1000
    G = G if last == "rows" else G.mT
    found = []
    for f, dtype in ((mhc_gates, torch.float32), (reference.mhc_gates, torch.float64)):
        x = z.to(dtype, copy=True).requires_grad_()
        H = f(x, *(y.to(dtype) for y in given), n, last=last, iterations=iterations)[2]
        found += torch.autograd.grad(H, x, G.to(dtype))
    assert error(*found) < 1e-5


@pytest.mark.parametrize("place", [8, 15, 23], ids=["first", "middle", "last"])
def test_a_logit_that_is_no_number_is_left_to_logarithms(place):
    """Also where others follow: comparisons forget a NaN, and with it the logits far apart before it."""
    z, given = torch.zeros(9, 24), (torch.ones(3), torch.zeros(24))
    z[4, 8], z[4, place] = -90.0, float("nan")
    form = stream_gates.Form(True, 4, False, 20, True, 2.0)
    library = stream_gates.library(form, z, given[1], given[0])
    assert stream_gates.forward(library, form, z, given[1], given[:1]) is None
    found = mhc_gates(z, *given, 4)[2]
    with choice.requesting("plain"):
        torch.testing.assert_close(found, mhc_gates(z, *given, 4)[2], rtol=0, atol=0, equal_nan=True)


def test_what_is_no_number_stays_visible():
    z = torch.randn(19, 24)
    z[5, 20] = z[7, 2] = float("nan")
    P, _, H = mhc_gates(z, torch.ones(3), torch.zeros(24), 4)
    assert (P[7].isnan().any(), P[5].isnan().any(), H[5].isnan().any(), H[7].isnan().any()) == (1, 0, 1, 0)
    z[7, 2] = 0
    A_m, A_rT, B = hyper_gates(z.view(19, 4, 6), torch.zeros(4, 6), torch.ones(()), torch.ones(()))
    assert A_m.isfinite().all()
    assert B.isfinite().all()
    assert A_rT.isnan().nonzero().tolist() == [[5, 1, 3]]  # column 2 of stream 3: what it gives to stream 1


def test_any_layout_of_inputs_and_gradients():
    for f, plain, inputs in cases((4, 3), 3, torch.float32):
        leaves = [x.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in inputs]
        made, wanted = ([y for y in g(*leaves) if y is not None] for g in (f, plain))
        for odd in (lambda y: torch.ones(1).expand(y.shape), lambda y: torch.randn_like(y.mT).mT):
            cotangents = [odd(y) for y in wanted]
            found = torch.autograd.grad(made, leaves, cotangents, retain_graph=True)
            expected = torch.autograd.grad(wanted, leaves, cotangents, retain_graph=True)
            assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))


def test_one_gradient_of_one_gate():
    z, a, b = torch.randn(13, 24, requires_grad=True), torch.ones(3), torch.randn(24)
    H = mhc_gates(z, a, b, 4)[2]
    (found,) = torch.autograd.grad(H[3, 1, 2], z)
    (wanted,) = torch.autograd.grad(reference.mhc_gates(z, a, b, 4)[2][3, 1, 2], z)
    assert error(found, wanted) < 1e-6
    assert not found[:3].any()


def test_threads_share_the_tokens(monkeypatch):
    z, a, b = torch.randn(1001, 24), torch.randn(3), torch.randn(24)
    runs = [lambda *x, f=f: f(*x, 4) for f in (mhc_gates, reference.mhc_gates)]
    monkeypatch.setattr("twoaxis.ops.native.stream_gates.threads", lambda: 3)
    assert max(error(x, y) for x, y in both(*runs, (z, a, b))) < 1e-5


def test_second_gradients_are_refused_and_changes_in_place_are_seen():
    z, a, b = torch.randn(9, 24, requires_grad=True), torch.ones(3), torch.zeros(24)
    P = mhc_gates(z, a, b, 4)[0]
    with pytest.raises(RuntimeError, match="first-order"):
        torch.autograd.grad(P.sum(), z, create_graph=True)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        P.sum().backward()


@pytest.mark.parametrize(
    ("depth", "calls"),
    [
        ("hyper_connections", 8),
        ("hyper_connections(norm='rms', tanh=False)", 8),
        ("hyper_connections(dynamic=False)", 0),
        ("mhc(streams=2, last='columns')", 8),
        ("mhc(eps=1e-6)", 0),
        ("mhc(gates='softmax')", 0),
        ("mhc(mixing='permutations', streams=3)", 0),
    ],
)
def test_models_call_it_once_each_way(depth, calls, counting):
    libraries = counting("stream_gates"), counting("stream_pass")  # a write makes the next gates, too
    cfg = ModelConfig(vocab_size=11, d_model=16, n_blocks=2, n_heads=2, depth=depth)
    rows = torch.arange(20).view(2, 10) % 11
    Decoder(cfg).loss(rows, rows).backward()
    assert sum(len(library.calls) for library in libraries) == calls
