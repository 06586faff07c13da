"""What a sublayer takes of its streams as one node, against the operators that it is made of."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel

from twoaxis import Decoder, ModelConfig
from twoaxis.depth.hyper_connections import HyperConnections
from twoaxis.depth.mhc import MHC
from twoaxis.ops import reference, stream_write
from twoaxis.ops.joint_take import mhc_take
from twoaxis.ops.native.stream_gates import Form
from twoaxis.ops.native.stream_pass import Taking
from twoaxis.ops.stream_take import hyper_take

pytestmark = [needs_kernel(name) for name in ("streams", "stream_scores", "stream_gates")]
EPS = {"eps": 1e-3, "read_eps": 1e-2}


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def hyper_taking(n, matrix, static, s_alpha, s_beta, gain):
    return Taking(Form(False, n, tanh=True), matrix, static, (s_alpha, s_beta), gain, *EPS.values())


def mhc_taking(n, phi, scales, bias, gain, iterations=5, last="columns", write_scale=3.0):
    form = Form(True, n, False, iterations, last == "rows", write_scale)
    return Taking(form, phi, bias, (scales,), gain, *EPS.values())


def hyper(n, d, lead, dtype):
    """The node, the same by references, and inputs."""

    def fast(X, *learned):
        return hyper_take(X, hyper_taking(n, *learned))[:4]

    def plain(X, matrix, *learned_and_gain):
        *learned, gain = learned_and_gain
        w, mixing, b = reference.hyper_gates(reference.stream_scores(X, matrix, EPS["eps"]), *learned)
        return reference.stream_read(X, w, gain=gain, eps=EPS["read_eps"]), mixing, b, X

    shapes = [(d, n + 2), (n, n + 2), (), ()]
    return fast, plain, [torch.randn(*lead, n, d).to(dtype), *map(torch.randn, shapes), torch.randn(d)]


def mhc(n, d, lead, dtype, groups=3):
    options = {"iterations": 5, "last": "columns", "write_scale": 3.0}

    def fast(X, *learned):
        return mhc_take(X, mhc_taking(n, *learned, **options))[:4]

    def plain(X, phi, *learned_and_gain):
        *learned, gain = learned_and_gain
        w, b, mixing = reference.mhc_gates(reference.joint_scores(X, phi, EPS["eps"]), *learned, n, **options)
        return reference.stream_read(X, w, gain=gain, eps=EPS["read_eps"]), mixing, b, X

    columns = 2 * n + n * n * (groups == 3)
    learned = [torch.randn(n * d, columns) / d, torch.randn(groups), torch.randn(columns), torch.randn(d)]
    return fast, plain, [torch.randn(*lead, n, d).to(dtype), *learned]


CASES = {
    "hyper": lambda *shape: hyper(*shape),
    "mhc": lambda *shape: mhc(*shape),
    "mhc without mixing": lambda *shape: mhc(*shape, groups=2),
}


def gradients(made, leaves, which):
    """Of some of the outputs, with the same cotangents in every dtype."""
    chosen = [x for x, take in zip(made, which) if take and x is not None]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype) for x in chosen]
    return torch.autograd.grad(chosen, leaves, cotangents, allow_unused=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("n", "d", "lead"), [(1, 5, (7,)), (3, 33, (2, 9)), (4, 24, (3, 43))], ids=str)
def test_equals_the_references(case, dtype, n, d, lead):
    fast, plain, inputs = case(n, d, lead, dtype)
    leaves, exact = ([x.to(t).requires_grad_() for x in inputs] for t in (None, torch.float64))
    found, wanted = fast(*leaves), plain(*exact)
    rounding = 1e-5 + torch.finfo(dtype).eps / 2
    for a, b in zip(found, wanted, strict=True):
        assert a is b is None or error(a, b) <= rounding
    for which in [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)]:
        if not any(x is not None and take for x, take in zip(found, which)):
            continue
        ours = gradients(fast(*leaves), leaves, which)
        for a, b, x in zip(ours, gradients(plain(*exact), exact, which), inputs, strict=True):
            assert a.dtype == x.dtype
            assert error(a, torch.zeros(a.shape) if b is None else b) <= rounding + torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_streams_without_a_gradient(case):
    fast, plain, (X, *learned) = case(2, 6, (5,), torch.float32)
    leaves = [x.requires_grad_() for x in learned]
    ours, theirs = (gradients(f(X, *leaves), leaves, (1, 1, 1, 0)) for f in (fast, plain))
    assert all(error(a, b) < 1e-5 for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(RuntimeError, match="first-order"):
        torch.autograd.grad(fast(X, *leaves)[0].sum(), leaves, create_graph=True)


def test_what_no_kernel_covers_is_left():
    _, _, (X, *learned) = mhc(2, 6, (5,), torch.float32)
    with torch.no_grad():  # a step of decoding
        assert mhc_take(X, mhc_taking(2, *learned)) is None
    learned[2][4] = 1e3  # a logit too far from the others for numbers
    assert mhc_take(X.requires_grad_(), mhc_taking(2, *learned)) is None
    _, _, (X, *learned) = hyper(9, 6, (5,), torch.float32)
    assert hyper_take(X, hyper_taking(9, *learned)) is None


@pytest.mark.parametrize(
    ("depth", "kind"), [("hyper_connections", HyperConnections), ("mhc(streams=3)", MHC)]
)
def test_models_have_the_gradients_of_the_operators_one_by_one(depth, kind, monkeypatch):
    cfg = ModelConfig(vocab_size=11, d_model=16, n_blocks=3, n_heads=2, depth=depth)
    torch.manual_seed(0)
    model, rows = Decoder(cfg), torch.arange(26).view(2, 13) % 11
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))

    def run():
        model.zero_grad()
        loss = model.loss(rows, rows)
        loss.backward(retain_graph=True)
        loss.backward()  # rebuilds once more
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    found = run()
    monkeypatch.setattr(kind, "take", lambda *_: None)
    assert all(error(a, b) < 1e-5 for a, b in zip(found, run(), strict=True))


def test_another_state_is_written_by_itself():
    _, _, inputs = hyper(2, 6, (5,), torch.float32)
    X, *learned = [x.requires_grad_() for x in inputs]
    taken = hyper_take(X, hyper_taking(2, *learned))
    other, given = torch.randn(5, 2, 6, requires_grad=True), (taken.mixing, taken.write, torch.randn(5, 6))
    assert error(stream_write(taken.last(X), *given), reference.stream_write(X, *given)) < 1e-6
    (found,) = torch.autograd.grad(stream_write(taken.last(other), *given).sum(), other)
    assert error(found, taken.mixing.sum(-2).unsqueeze(-1).expand(5, 2, 6)) < 1e-6
