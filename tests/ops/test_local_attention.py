"""local_attention: every backend against the plain reference, and the reference against loops over tokens."""

import math
import sys

import pytest
import torch
from agreement import agree, error, results
from attention_cases import NAMES, backends, options, qkv
from torch import Tensor
from torch.autograd import gradcheck

from twoaxis.errors import InputError
from twoaxis.ops import choice, local_attention, reference
from twoaxis.ops.local_attention import choose

CASES = [(name, backend) for name in NAMES for backend in backends(name)]


def compare(backend, window, inputs, kwargs, leaves, tolerance):
    """All gradients too: those of q, k, v and of the named options."""
    tensors = [*inputs, *(kwargs[name] for name in leaves)]
    rest = {name: x for name, x in kwargs.items() if name not in leaves}

    def call(attend, **choice):
        return lambda q, k, v, *more: attend(
            q, k, v, window, **rest, **dict(zip(leaves, more, strict=True)), **choice
        )

    agree(call(local_attention, backend=backend), call(reference.local_attention), tensors, tolerance)


def by_loops(q, k, v, window, scale, ids, sink_logits, sink_tokens, bias) -> Tensor:
    """The definition, token by token, with Python's own arithmetic for the weights."""
    (B, H, Tq, _), (_, Hkv, Tk, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(Tq):
                p, weights = Tk - Tq + i, {}
                mine = [s for s in range(Tk) if ids[b][s] == ids[b][p]]
                for s in mine:
                    inside = 0 <= p - s < window
                    if ids[b][p] >= 0 and (inside or (s <= p and s in mine[:sink_tokens])):
                        score = scale * float(q[b, h, i] @ k[b, h // (H // Hkv), s])
                        weights[s] = math.exp(score + (float(bias[h, p - s]) if inside else 0.0))
                total = sum(weights.values()) + math.exp(float(sink_logits[h]))
                for s, weight in weights.items():
                    out[b, h, i] += weight / total * v[b, h // (H // Hkv), s]
    return out


@pytest.mark.parametrize("window", [1, 3, 12])
@pytest.mark.parametrize("Tq", [9, 2])
def test_reference_is_the_definition(window, Tq):
    q, k, v = qkv(9, Tq=Tq)
    kwargs, _ = options("all", 9, window)
    kwargs["segments"] = torch.tensor([[-1, 5, 5, 5, 5, 2, 2, 2, 2], [0] * 7 + [-1, 3]])
    expected = by_loops(
        q,
        k,
        v,
        window,
        *(kwargs[x] for x in ("scale", "segments", "sink_logits", "sink_tokens", "position_bias")),
    )
    assert error(reference.local_attention(q, k, v, window, **kwargs), expected) < 1e-14


@pytest.mark.parametrize(("name", "backend"), CASES, ids=[f"{n}-{b}" for n, b in CASES])
@pytest.mark.parametrize("T", [1, 33, 127, 128, 129])
def test_equals_the_reference(T, name, backend):
    for window in (1, 2, 7, T, T + 5):
        kwargs, leaves = options(name, T, window)
        compare(backend, window, qkv(T), kwargs, leaves, 1e-12)


@pytest.mark.parametrize(("name", "backend"), CASES, ids=[f"{n}-{b}" for n, b in CASES])
def test_full_attention_equals_the_reference(name, backend):
    kwargs, leaves = options(name, 70, None)
    compare(backend, None, qkv(70), kwargs, leaves, 1e-12)


@pytest.mark.parametrize(("name", "backend"), CASES, ids=[f"{n}-{b}" for n, b in CASES])
@pytest.mark.parametrize("Tq", [1, 2, 40])
def test_new_queries_against_a_cache(Tq, name, backend):
    for window in (1, 4, 16, 100):
        kwargs, leaves = options(name, 90, window)
        compare(backend, window, qkv(90, Tq=Tq), kwargs, leaves, 1e-12)


@pytest.mark.parametrize("D", [1, 3, 24, 33, 80])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (5, 1)], ids=["MHA", "GQA", "MQA"])
def test_head_sizes_and_groups(D, heads):
    H, Hkv = heads
    for backend in ("blocked", "sdpa"):
        compare(backend, 7, qkv(37, D, H=H, Hkv=Hkv), {}, [], 1e-12)


def test_many_rows_are_cut_into_slabs(monkeypatch):
    monkeypatch.setattr("twoaxis.ops.backends.blocked._SLAB", 1)  # one batch row at a time
    kwargs, leaves = options("all", 50, 7, B=3)
    compare("blocked", 7, qkv(50, B=3), kwargs, leaves, 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float32(name):
    for window in (7, 64):
        kwargs, leaves = options(name, 150, window, torch.float32)
        compare("blocked", window, qkv(150, 24, dtype=torch.float32), kwargs, leaves, 1e-5)


def test_bfloat16_is_no_worse_than_torchs_own_kernel():
    """Both round inputs, output and gradients; the kernel may round more inside."""
    inputs = qkv(150, 24, dtype=torch.bfloat16)
    exact = results(lambda q, k, v: reference.local_attention(q, k, v, 64), [x.double() for x in inputs])
    errors = {
        backend: [
            error(a, b)
            for a, b in zip(
                results(lambda *x, b=backend: local_attention(*x, 64, backend=b), inputs), exact, strict=True
            )
        ]
        for backend in ("blocked", "sdpa")
    }
    for ours, torchs in zip(errors["blocked"], errors["sdpa"], strict=True):
        assert 0 < ours <= 1.05 * torchs


@pytest.mark.parametrize("case", ["plain", "all"])
def test_gradcheck(case):
    window = 2
    q, k, v = (x.requires_grad_() for x in qkv(18, 2, B=1, H=2, Hkv=1))  # two blocks
    kwargs, leaves = options(case, 18, window, B=1, H=2)
    rest = {name: x for name, x in kwargs.items() if name not in leaves}
    more = [kwargs[name].requires_grad_() for name in leaves]

    def f(q, k, v, *more):
        return local_attention(
            q, k, v, window, backend="blocked", **rest, **dict(zip(leaves, more, strict=True))
        )

    assert gradcheck(f, (q, k, v, *more))


def test_second_derivatives_are_refused_aloud():
    q, k, v = (x.requires_grad_() for x in qkv(5))
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(local_attention(q, k, v, 2, backend="blocked").sum(), q, create_graph=True)
    out = local_attention(q, k, v, 2, backend="reference")
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    first.sum().backward()


@pytest.mark.parametrize("backend", ["blocked", "sdpa", "reference"])
def test_autocast_does_not_touch_the_softmax(backend):
    inputs = qkv(40, dtype=torch.float32)
    plain = results(lambda q, k, v: local_attention(q, k, v, 7, backend="blocked"), inputs)

    def inside(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return local_attention(q, k, v, 7, backend=backend)

    for one, other in zip(results(inside, inputs), plain, strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize(
    ("units", "dtype", "queries", "expected"),
    [
        (False, torch.bfloat16, 80, "blocked"),
        (False, torch.bfloat16, 1, "sdpa"),  # a step of decoding
        (False, torch.float32, 80, "sdpa"),
        (True, torch.bfloat16, 80, "sdpa"),
    ],
    ids=["emulated", "one query", "float32", "units"],
)
def test_training_in_emulated_bfloat16_is_left_to_blocks(monkeypatch, units, dtype, queries, expected):
    monkeypatch.setattr(sys.modules[choose.__module__], "BF16_UNITS", units)
    q, k = torch.zeros(1, 2, queries, 8, dtype=dtype), torch.zeros(1, 2, 80, 8, dtype=dtype)
    with choice.requesting("plain"):
        assert choose("auto", q, k, k, None) == expected
        with torch.no_grad():
            assert choose("auto", q, k, k, None) == "sdpa"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "flash"}, "backend='flash'"),
        ({"backend": "sdpa", "sink_logits": torch.zeros(4)}, "backend='sdpa' has no sink_logits"),
        ({"sink_logits": torch.zeros(3)}, r"sink_logits \(3,\)"),
        ({"sink_tokens": -1}, "sink_tokens=-1"),
        ({"sink_tokens": True}, "sink_tokens=True"),
        ({"position_bias": torch.zeros(4, 2)}, r"position_bias \(4, 2\)"),
        ({"position_bias": torch.zeros(4, 3), "window": None}, "needs a finite window"),
        ({"segments": torch.zeros(2, 4, dtype=torch.long)}, r"segments \(2, 4\)"),
        ({"segments": torch.zeros(2, 5)}, "integer ids"),
        ({"k": torch.zeros(2, 3, 5, 3), "v": torch.zeros(2, 3, 5, 3)}, "4 query heads, 3 key heads"),
        ({"v": torch.zeros(2, 2, 4, 3)}, "k and v"),
        ({"q": torch.zeros(2, 4, 6, 3)}, "Tq <= Tk"),
        ({"q": torch.zeros(2, 4, 5, 3)}, "one floating-point dtype"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_refused_in_one_line(change, message):
    q, k, v = qkv(5)
    arguments = {"q": q, "k": k, "v": v, "window": 3} | change
    with pytest.raises(InputError, match=message) as refused:
        local_attention(**arguments)
    assert "\n" not in str(refused.value)


def test_sinks_of_interleaved_segments_are_refused():
    """The mask defines them; blocks would have to look for them anywhere."""
    q, k, v = qkv(40)
    ids = (torch.arange(40) % 2).expand(2, 40)
    with pytest.raises(InputError, match="interleaved"):
        local_attention(q, k, v, 4, segments=ids, sink_tokens=1, backend="blocked")
