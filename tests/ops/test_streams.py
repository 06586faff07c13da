"""Operators on several streams and on value channels against their plain twins."""

import pytest
import torch
from agreement import agree, error, results, rounded_once

from twoaxis.errors import InputError
from twoaxis.ops import channel_read, joint_scores, reference, stream_read, stream_scores, stream_write

LEADS = [(3, 5), (33,), (1,), (0, 4), (2, 0)]


def call(name, *rest, **options):
    """The operator and its twin, as functions of their tensors."""
    fast = globals()[name]
    plain = getattr(reference, name)
    return tuple(lambda *x, f=f: f(*x, *rest, **options) for f in (fast, plain))


def cases(lead, n, d, dtype=torch.float64):
    """(operator and twin, inputs)."""

    def made(*shapes):
        return [torch.randn(shape).to(dtype) for shape in shapes]

    X, ones = (*lead, n, d), (1,) * len(lead)
    yield call("stream_scores", 1e-6), made(X, (d, n + 2))
    yield call("joint_scores", 1e-6), made(X, (n * d, 3))
    yield call("stream_read"), made(X, (*lead, n))
    yield call("stream_read", eps=1e-3), made(X, (*ones, n))
    gained = tuple(
        lambda x, w, g, f=f: f(x, w, gain=g, eps=1e-3) for f in (stream_read, reference.stream_read)
    )
    yield gained, made(X, (*lead, n), (d,))
    yield call("stream_write"), made(X, (*lead, n, n), (*lead, n), (*lead, d))
    yield call("stream_write"), made(X, (*ones, n, n), (*ones, n), (*lead, d))
    unmixed = tuple(lambda x, b, y, f=f: f(x, None, b, y) for f in (stream_write, reference.stream_write))
    yield unmixed, made(X, (*lead, n), (*lead, d))
    yield call("channel_read"), made((*lead, d, n), (d, n))


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(("n", "d"), [(1, 5), (4, 24), (3, 33)], ids=str)
def test_equals_the_reference(lead, n, d):
    for (fast, plain), inputs in cases(lead, n, d):
        agree(fast, plain, inputs, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_low_precision_is_rounded_once(dtype):
    for (fast, plain), inputs in cases((2, 43), 4, 33, dtype):
        found = results(fast, inputs)
        exact = results(plain, [x.double() for x in inputs])
        if found[0].dtype == torch.float32:  # scores stay wide; only their gradients are rounded
            assert error(found[0], exact[0]) < 1e-5
        rounded_once(found[1:], exact[1:])


def test_any_layout_of_inputs_and_gradients():
    for (fast, plain), inputs in cases((4, 3), 3, 12):
        odd = [x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x for x in inputs]
        leaves = [x.requires_grad_() for x in odd]
        out, wanted = fast(*leaves), plain(*leaves)
        for cotangent in (torch.ones(1, dtype=out.dtype).expand(out.shape), torch.randn_like(wanted.mT).mT):
            found, again = (torch.autograd.grad(out, leaves, cotangent, retain_graph=True) for _ in range(2))
            expected = torch.autograd.grad(wanted, leaves, cotangent, retain_graph=True)
            assert all(error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))
            assert all(a.equal(b) for a, b in zip(found, again, strict=True))
        with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
            torch.autograd.grad(out.sum(), leaves[0], create_graph=True)


X = torch.zeros(2, 3, 4, 6)
REFUSED = {
    "weights": (lambda: stream_read(X, X[:, 0, :, 0]), r"weights \(2, 4\) for streams"),
    "gain": (lambda: stream_read(X, X[..., 0], gain=X[0, 0, 0, :5], eps=1e-6), r"gain \(5,\)"),
    "mixing": (lambda: stream_write(X, X, X[..., 0], X[..., 0, :]), r"mixing \(2, 3, 4, 6\)"),
    "branch": (lambda: stream_write(X, None, X[..., 0], X[:, :1, 0]), r"branch \(2, 1, 6\)"),
    "matrix": (lambda: stream_scores(X, X[0, 0], 1e-6), r"matrix \(4, 6\).*give \(d, c\)"),
    "joint matrix": (lambda: joint_scores(X, X[0, 0], 1e-6), r"give \(n d, c\)"),
    "channels": (lambda: channel_read(X, X[0, 0].mT), r"give \(\.\.\., d, m\) and \(d, m\)"),
}


@pytest.mark.parametrize(("run", "says"), REFUSED.values(), ids=REFUSED)
def test_shapes_that_do_not_fit_are_refused(run, says):
    with pytest.raises(InputError, match=says):
        run()
