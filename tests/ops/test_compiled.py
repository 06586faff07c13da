"""TWOAXIS_BACKEND=compiled: the equations under torch.compile, where training asks for them."""

import pytest
import torch
from agreement import agree
from test_streams import cases

from twoaxis.ops import choice, delta_rewrite, depth_read, reference

QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # the tracer's own


@pytest.fixture
def traced(monkeypatch):
    """Which equations were asked for; each compiled by the given backend."""
    asked, compile_ = [], torch.compile

    def compiling(backend):
        def replace(f, **options):
            asked.append(f.__name__)
            return compile_(f, backend=backend, **options)

        monkeypatch.setattr(torch, "compile", replace)
        return asked

    monkeypatch.setenv("TWOAXIS_BACKEND", "compiled")
    monkeypatch.setattr(choice, "_equations", {})
    yield compiling
    torch._dynamo.reset()


def check(asked):
    w = torch.randn(24, dtype=torch.float64)
    for n in (2, 3):
        sources = [torch.randn(5, 24, dtype=torch.float64) for _ in range(n)]
        agree(lambda w, *s: depth_read(w, s), lambda w, *s: reference.depth_read(w, s), [w, *sources], 1e-12)
    state = [torch.randn(s, dtype=torch.float64) for s in ((5, 6, 4), (5, 6), (5, 4), (5, 1))]
    agree(lambda *x: delta_rewrite(*x, 1e-3), lambda *x: reference.delta_rewrite(*x, 1e-3), state, 1e-12)
    for (fast, plain), inputs in cases((5,), 4, 24):
        agree(fast, plain, inputs, 1e-12)
    assert set(asked) == {
        "depth_read", "delta_rewrite", "stream_scores", "joint_scores", "stream_read", "stream_write", "channel_read"
    }  # fmt: skip


@QUIET
def test_operators_ask_for_their_equations(traced):
    check(traced("eager"))


@QUIET
@pytest.mark.full
def test_equations_compiled_for_real(traced):
    check(traced("inductor"))


def test_not_without_gradients_and_not_unasked(traced, monkeypatch):
    asked = traced("eager")
    with torch.no_grad():
        depth_read(torch.ones(6), (torch.randn(4, 6),))
    monkeypatch.setenv("TWOAXIS_BACKEND", "auto")
    depth_read(torch.ones(6, requires_grad=True), (torch.randn(4, 6),))
    assert asked == []
