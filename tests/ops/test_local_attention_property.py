"""local_attention equals its reference for options that nobody thought of."""

from itertools import pairwise

import torch
from agreement import agree
from hypothesis import given, settings
from hypothesis import strategies as st

from twoaxis.ops import local_attention, reference


@st.composite
def calls(draw):
    """Inputs, differentiable options and the other options of one call."""
    B, Hkv, group, D = (draw(st.integers(1, 3)) for _ in range(4))
    Tk = draw(st.integers(1, 80))
    Tq = draw(st.integers(1, Tk))
    window = draw(st.one_of(st.none(), st.integers(1, Tk + 3)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def tensor(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=random)

    H = Hkv * group
    inputs = [tensor(B, H, Tq, D), tensor(B, Hkv, Tk, D), tensor(B, Hkv, Tk, D)]
    leaves, rest = {}, {"window": window, "sink_tokens": draw(st.integers(0, 4))}
    if draw(st.booleans()):
        leaves["sink_logits"] = tensor(H)
    if window is not None and draw(st.booleans()):
        leaves["position_bias"] = tensor(H, window)
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        padded = torch.nn.functional.pad(ids, (draw(st.integers(0, 3)), Tk), value=-1)[:Tk]
        rest["segments"] = torch.stack([padded.roll(draw(st.integers(0, 2))) for _ in range(B)])
    if draw(st.booleans()):
        rest["scale"] = draw(st.floats(0.1, 2))
    return inputs, leaves, rest


def interleaved(segments) -> bool:
    """A rolled row may open and close with the same segment."""
    for row in segments.tolist():
        ids = [x for x in row if x >= 0]
        if ids and len(set(ids)) != 1 + sum(a != b for a, b in pairwise(ids)):
            return True
    return False


@settings(max_examples=60, deadline=None)
@given(calls())
def test_equals_the_reference(call):
    inputs, leaves, rest = call
    if rest["sink_tokens"] and interleaved(rest.get("segments", torch.zeros(1, 1))):
        rest["sink_tokens"] = 0
    choices = ["blocked", "auto"] if leaves else ["blocked", "auto", "sdpa"]
    for backend in choices:

        def f(q, k, v, *more, attend=local_attention, backend=backend):
            options = dict(zip(leaves, more, strict=True)) | rest
            return attend(q, k, v, backend=backend, **options)

        def plain(*tensors, f=f):
            return f(*tensors, attend=reference.local_attention)

        agree(f, plain, [*inputs, *leaves.values()], 1e-12)
