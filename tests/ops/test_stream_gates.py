"""Gates of several streams from their scores against their plain twins."""

import pytest
import torch
from agreement import error

from twoaxis.errors import InputError
from twoaxis.ops import hyper_gates, mhc_gates, reference

LEADS = [(3, 5), (33,), (1,), (0, 4), (2, 0)]


def both(f, plain, inputs):
    """Results and gradients of an operator, and of its twin in float64."""
    found = []
    for run, leaves in ((f, list(inputs)), (plain, [x.double() for x in inputs])):
        leaves = [x.detach().requires_grad_() for x in leaves]
        made = [x for x in run(*leaves) if x is not None]
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in made]
        found.append([*made, *torch.autograd.grad(made, leaves, cotangents)])
    for x, gradient in zip(inputs, found[0][-len(inputs) :], strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
    return zip(*found, strict=True)


def cases(lead, n, dtype=torch.float64, far=2.0):
    """(operator, twin, inputs); far: how large the logits of a mixing are."""

    def made(*shapes):
        return [torch.randn(shape).to(dtype) for shape in shapes]

    for tanh in (True, False):
        run = [lambda *x, f=f, t=tanh: f(*x, tanh=t) for f in (hyper_gates, reference.hyper_gates)]
        yield *run, made((*lead, n, n + 2), (n, n + 2), (), (1,))
    for groups in (2, 3):
        columns = 2 * n + n * n * (groups == 3)
        for options in ({}, {"iterations": 3, "last": "columns", "write_scale": 0.5}, {"iterations": 0}):
            run = [
                lambda z, a, b, f=f, o=options: f(z, a, b, n, **o) for f in (mhc_gates, reference.mhc_gates)
            ]
            scores, a, b = made((*lead, columns), (groups,), (columns,))
            yield *run, [far * scores, a, b]


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_equals_the_reference(lead, n):
    for f, plain, inputs in cases(lead, n):
        assert max(error(a, b) for a, b in both(f, plain, inputs)) < 1e-12


def test_eps_is_added_to_the_read_and_inside_sinkhorn():
    z, a, b = torch.randn(3, 24), torch.randn(3), torch.randn(24)
    found = both(
        lambda *x: mhc_gates(*x, 4, eps=0.1), lambda *x: reference.mhc_gates(*x, 4, eps=0.1), (z, a, b)
    )
    assert max(error(x, y) for x, y in found) < 1e-5


def test_low_precision_is_computed_in_float32():
    for f, plain, inputs in cases((2, 43), 4, torch.bfloat16):
        made = f(*inputs)
        assert all(x is None or x.dtype == torch.float32 for x in made)
        for a, b in both(f, plain, inputs):
            assert error(a, b) <= 1e-5 + torch.finfo(a.dtype).eps / 2


z, s = torch.randn(2, 4, 6), torch.ones(())
REFUSED = {
    "static": (lambda: hyper_gates(z, z[0, :, :5], s, s), r"static \(4, 5\): give \(..., n, n \+ 2\)"),
    "scores": (lambda: hyper_gates(z[0], z[0], s, s), r"scores \(4, 6\).*give"),
    "scale": (lambda: hyper_gates(z, z[0], s.expand(2), s), "scales of one number"),
    "bias": (lambda: mhc_gates(z, z[0, 0, :3], z[0, 0], 4), r"bias \(6,\) for 4 streams"),
    "scales": (lambda: mhc_gates(z, z[0, 0, :4], z[0, 0], 3), r"scales \(4,\).*2 or 3 scales"),
    "columns": (lambda: mhc_gates(z, z[0, 0, :2], z[0, 0, :4], 2), r"scores \(2, 4, 6\)"),
}  # fmt: skip


@pytest.mark.parametrize(("run", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(run, says):
    with pytest.raises(InputError, match=says):
        run()
