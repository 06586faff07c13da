"""Other kernels of a decoding step, DDL's read and write and mHC's read, against their equations in float64."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from torch import randn

from twoaxis.ops import delta_rewrite, reference, reference_steps
from twoaxis.ops.native import delta_step, gates_step, streams_step

pytestmark = [
    needs_kernel("delta_step"),
    needs_kernel("streams_step"),
    needs_kernel("delta_rewrite"),
    needs_kernel("gates_step"),
]
LEADS = pytest.mark.parametrize("lead", [(1, 1), (8, 1), (2, 3)], ids=str)
WIDTHS = pytest.mark.parametrize("d", [1, 33, 344])


@pytest.fixture(autouse=True)
def step(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    with torch.no_grad():
        yield


def double(x):
    return tuple(map(double, x)) if isinstance(x, tuple) else None if x is None else x.double()


def agree(found, wanted):
    assert all(x.dtype == torch.float32 for x in found)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-5


@LEADS
@WIDTHS
@pytest.mark.parametrize("channels", ["1", "4 by 4 taps", "3 by 5 taps", "2 free"])
def test_delta_read(channels, d, lead):
    m, free, taps = int(channels[0]), channels.endswith("free"), int(channels[5]) if "by" in channels else 0
    kernel = randn(d, m if free else taps) if free or taps else None
    state = randn(*lead, d) if kernel is None else randn(*lead, d, m)
    for scale, raw, bias in ((4.0, True, randn(m)), (0.0, False, None), (2.0, False, randn(m))):
        inputs = (
            state,
            kernel,
            randn(m) if taps else None,
            randn(d),
            (randn(1, d), randn(1)),
            (randn(m, d), bias),
        )
        options = {"eps": 1e-6, "scale": scale, "raw": raw}
        agree(delta_step.read(*inputs, **options), reference_steps.delta_read(*double(inputs), **options))


@LEADS
@WIDTHS
@pytest.mark.parametrize("m", [None, 1, 4])
def test_delta_rewrite(m, d, lead, counting):
    library = counting("delta_rewrite")
    inputs = (randn(*lead, d, *([m] if m else [])), randn(*lead, d), randn(*lead, m or 1), randn(*lead, 1))
    agree([delta_rewrite(*inputs, 1e-5)], [reference.delta_rewrite(*double(inputs), 1e-5)])
    assert library.calls == ["delta_rewrite_forward"]


@LEADS
@WIDTHS
@pytest.mark.parametrize("n", [2, 4, 5])
def test_mhc_read(n, d, lead):
    for iterations, rows_last, mixes in ((20, True, True), (1, False, True), (3, True, False)):
        count = 2 * n + n * n * mixes
        phi = randn(n * d, count) / (n * d) ** 0.5
        inputs = (randn(*lead, n, d), phi, randn(2 + mixes), randn(count), randn(d))
        options = {"iterations": iterations, "rows_last": rows_last}
        options |= {"norm_eps": 1e-6, "output_eps": 1e-5, "write_scale": 2.0}
        agree(streams_step.mhc_read(*inputs, **options), reference_steps.mhc_read(*double(inputs), **options))


@LEADS
@WIDTHS
@pytest.mark.parametrize("n", [1, 4, 5])
@pytest.mark.parametrize("tanh", [True, False])
def test_hyper_read(tanh, n, d, lead):
    inputs = (randn(*lead, n, d), randn(n, n + 2), randn(d, n + 2) / d**0.5, (randn(()), randn(())), randn(d))
    options = {"tanh": tanh, "norm_eps": 1e-5, "output_eps": 1e-6}
    agree(streams_step.hyper_read(*inputs, **options), reference_steps.hyper_read(*double(inputs), **options))


@LEADS
@WIDTHS
@pytest.mark.parametrize("ramp", [1, 3])
def test_soft_window(ramp, d, lead):
    h, u, c, n = randn(*lead, d), randn(1, d), randn(1), 5
    K, logs = gates_step.soft_window(h, u, c, n, 4, ramp, 1e-6)
    wanted, shares = reference_steps.soft_window(h.double(), u.double(), c.double(), n, 4, ramp, 1e-6)
    agree([K, logs.exp()], [wanted, shares.exp()])  # near the end of a window a share may be 0 or 1e-8
    assert logs.shape == (n, *lead)


@LEADS
@pytest.mark.parametrize(("d", "gates"), [(6, 1), (33, 3), (344, 344)])
def test_axis_gate(d, gates, lead):
    inputs = (randn(*lead, d), randn(*lead, d), randn(gates, 2 * d) / d, randn(gates))
    agree([gates_step.axis_gate(*inputs, 1e-6)], [reference_steps.axis_gate(*double(inputs), 1e-6)])
    s, z, w, _ = inputs
    for bias, wanted in ((100.0, s), (-100.0, z)):  # exactly one of the two
        found = gates_step.axis_gate(s, z, w, torch.full((gates,), bias), 1e-6)
        agree([found], [reference.rms(wanted.double(), 1e-6)])


def test_logits_too_far_apart_are_left_to_the_plain_way():
    bias = torch.zeros(2 * 2 + 4)
    bias[-1] = -300
    inputs = (randn(1, 1, 2, 6), torch.zeros(12, 8), torch.ones(3), bias, torch.ones(6))
    options = {"iterations": 20, "rows_last": True, "norm_eps": 1e-6, "output_eps": 1e-6, "write_scale": 2.0}
    assert streams_step.mhc_read(*inputs, **options) is None


@pytest.mark.parametrize("why", ["float64", "strided", "gradients", "plain", "no token"])
def test_what_is_no_step_of_float32_is_plain(why, counting, monkeypatch):
    library, lead = counting("delta_rewrite"), (0, 1) if why == "no token" else (2, 1)
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain" if why == "plain" else "native")
    inputs = [randn(*lead, 6, 4), randn(*lead, 6), randn(*lead, 4), randn(*lead, 1)]
    if why == "float64":
        inputs[2] = inputs[2].double()
    if why == "strided":
        inputs[0] = randn(*lead, 4, 6).mT
    with torch.set_grad_enabled(why == "gradients"):
        found = delta_rewrite(*inputs, 1e-5)
    agree([found], [reference.delta_rewrite(*double(tuple(inputs)), 1e-5)])
    assert library.calls == (["delta_rewrite_forward"] if why == "gradients" else [])  # of the usual kernel
