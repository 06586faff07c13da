"""Token shift against its equation."""

import pytest
import torch
from cores import at_once, build, in_steps, inputs, layout

from twoaxis import spec
from twoaxis.sequence import TokenShift


def test_it_is_its_equation():
    core, x = build("token_shift"), inputs(2)
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    torch.testing.assert_close(at_once(core, x), x + core.mu * (before - x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 1.0, 0.25])
def test_start(mu):
    core, x = (
        TokenShift(spec.parse_spec("sequence", f"token_shift(mu={mu})"), layout(), 0).double(),
        inputs(2),
    )
    y = at_once(core, x)
    assert y[:, 0].equal(x[:, 0] * (1 - mu))
    assert y[:, 1:].equal(mu * x[:, :-1] + (1 - mu) * x[:, 1:])
    y.sum().backward()
    assert core.mu.grad.abs().min() > 0


def test_it_is_a_convolution_of_two_taps():
    core, conv, x = build("token_shift"), build("short_conv(kernel=2)"), inputs(2)
    with torch.no_grad():
        conv.conv.weight.copy_(torch.stack((core.mu, 1 - core.mu), -1))
    torch.testing.assert_close(in_steps(core, x, [3, 9]), at_once(conv, x), rtol=0, atol=1e-12)
