"""The kernel of a depth window's whole read, against its equation in float64."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from torch import randn

from twoaxis.norm import RMSNorm
from twoaxis.ops import reference_steps
from twoaxis.ops.native import window_step
from twoaxis.ops.reference_steps import Chooser, Projections

pytestmark = needs_kernel("window_step")
LEADS = pytest.mark.parametrize("lead", [(1, 1), (8, 1), (2, 3), (1, 2)], ids=str)
HEADS = pytest.mark.parametrize(("heads", "d"), [(1, 1), (1, 33), (2, 34), (3, 33), (2, 344)])
STATES = pytest.mark.parametrize("n", [1, 2, 3, 4])


@pytest.fixture(autouse=True)
def step(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    with torch.no_grad():
        yield


def double(x):
    if isinstance(x, tuple):
        made = map(double, x)
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    return x.double() if isinstance(x, torch.Tensor) else x


def projections(d, heads, ages=None, output=False):
    A, W_V, W_O = (randn(rows, d) / d**0.5 for rows in (heads * d, d, d))
    bias = None if ages is None else randn(heads, ages)
    return Projections(A, W_V, W_O if output else None, bias, heads, (d // heads) ** -0.5, 1e-6)


def both(states, p, norm=False, **options):
    """The kernel's outputs and the equation's, those that there are."""
    d = states[-1].shape[-1]
    module = RMSNorm(d, 1e-5)
    module.weight.copy_(randn(d))
    found = window_step.window_read(states, window_step.prepare(p), norm=module if norm else None, **options)
    wanted = reference_steps.window_read(
        double(states),
        double(p),
        gain=module.weight.double() if norm else None,
        output_eps=1e-5,
        **{name: double(x) for name, x in options.items()},
    )
    return found, wanted


def agree(found, wanted):
    assert [x is None for x in found] == [x is None for x in wanted]
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None]
    assert all(a.dtype == torch.float32 and a.shape == b.shape for a, b in pairs)
    assert max(error(a, b) for a, b in pairs) < 1e-5


@LEADS
@HEADS
@STATES
def test_reads(n, heads, d, lead):
    states = tuple(randn(*lead, d) for _ in range(n))
    for injection, ages, output, norm in (
        ("add", None, False, True),
        ("replace", n + 1, True, False),
        ("gated", n, False, True),
    ):
        gate = (randn(1, d), randn(1)) if injection == "gated" else None
        agree(*both(states, projections(d, heads, ages, output), norm, injection=injection, gate=gate))


@LEADS
@HEADS
@STATES
def test_windows_that_tokens_choose(n, heads, d, lead):
    states, share, p = tuple(randn(*lead, d) for _ in range(n)), randn(lead), projections(d, heads)
    for rows, most, ramp in ((1, 3, 1), (1, 2, 3), (max(n - 1, 1), 4, 0)):
        chooser = Chooser(randn(rows, d) / d**0.5, randn(rows), most, ramp, 0.1)
        agree(*both(states, p, True, chooser=chooser, share=share))


@LEADS
@HEADS
@STATES
def test_gates_between_two_axes(n, heads, d, lead):
    states, s, p = tuple(randn(*lead, d) for _ in range(n)), randn(*lead, d), projections(d, heads)
    for gates in {1, heads, d}:
        gate = randn(gates, 2 * d) / d, randn(gates)
        agree(*both(states, p, injection="axes", gate=gate, s=s))
    for bias in (100.0, -100.0):  # exactly one of the two
        gate = torch.zeros(1, 2 * d), torch.tensor([bias])
        agree(*both(states, p, injection="axes", gate=gate, s=s))


def test_states_that_no_token_reads_are_not_looked_at():
    states = (torch.full((1, 1, 6), torch.nan), randn(1, 1, 6), randn(1, 1, 6))
    p, chooser = projections(6, 1), Chooser(torch.zeros(1, 6), torch.tensor([-100.0]), 3, 1, 0.5)
    x, _, share = window_step.window_read(
        states, window_step.prepare(p), chooser=chooser, share=torch.zeros(1, 1)
    )
    wanted = reference_steps.window_read(double(states[-1:]), double(p))[0]
    assert error(x, wanted) < 1e-5
    assert share.item() == 0.5  # K = 1


@pytest.mark.parametrize(
    "why",
    ["float64", "strided matrix", "gradients", "plain", "no token", "nine tokens", "watched norm", "threads"],
)
def test_what_the_kernel_does_not_cover_is_left_alone(why, monkeypatch):
    lead = {"no token": (0, 1), "nine tokens": (9, 1)}.get(why, (2, 1))
    states, p, norm = tuple(randn(*lead, 6) for _ in range(3)), projections(6, 1), RMSNorm(6)
    prepared = window_step.prepare(p)
    assert window_step.window_read((randn(2, 1, 6),) * 3, prepared, norm=norm) is not None
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain" if why == "plain" else "native")
    if why == "float64":
        states = double(states)
    if why == "strided matrix":
        prepared = window_step.prepare(p._replace(value=p.value.mT))
    if why == "threads":
        monkeypatch.setattr(window_step, "threads", lambda: 2)
        prepared = window_step.prepare(p)
    if why == "watched norm":
        norm.register_forward_hook(lambda *_: None)
    with torch.set_grad_enabled(why == "gradients"):
        assert prepared is None or window_step.window_read(states, prepared, norm=norm) is None


def test_strided_states_are_read():
    states, p = tuple(randn(2, 6, 3).mT for _ in range(3)), projections(6, 1)
    agree(*both(states, p, True))
