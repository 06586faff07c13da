"""Failures that sliding windows have had elsewhere, a test each; every docstring quotes its pitfall."""

import pytest
import torch
from agreement import agree, error, results
from attention_cases import options, qkv

from twoaxis.errors import InputError
from twoaxis.ops import local_attention, reference

BACKENDS = ["reference", "blocked", "sdpa", "auto"]
backends = pytest.mark.parametrize("backend", BACKENDS)


@backends
@pytest.mark.parametrize("step", [False, True], ids=["prefill", "decode"])
def test_a_token_moves_its_window_and_no_more(backend, step):
    """One layer, w=4, T=12; change token j alone -> exactly positions j..j+w-1 move."""
    x = torch.randn(1, 1, 12, 3, dtype=torch.float64)

    def outputs(x):
        if not step:
            return local_attention(x, x, x, 4, backend=backend)[0, 0]
        rows = [
            local_attention(x[:, :, t : t + 1], x[:, :, : t + 1], x[:, :, : t + 1], 4, backend=backend)
            for t in range(12)
        ]
        return torch.cat(rows, dim=2)[0, 0]

    before = outputs(x)
    for j in range(12):
        changed = x.clone()
        changed[0, 0, j] += 1
        moved = (outputs(changed) != before).any(-1).nonzero().flatten().tolist()
        assert moved == list(range(j, min(j + 4, 12)))


@backends
def test_a_fuller_store_is_still_windowed(backend):
    """w=4, a cache of 10 keys, one new query -> it sees only the newest 4, its own included."""
    q, k, v = qkv(10, Tq=1)
    out = local_attention(q, k, v, 4, backend=backend)
    assert error(out, reference.local_attention(q, k[:, :, 6:], v[:, :, 6:], None)) < 1e-15


@pytest.mark.parametrize("backend", ["blocked", "sdpa", "auto"])
@pytest.mark.parametrize("Tq", [1, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_keys_before_the_window_are_not_even_read(backend, Tq, sinks):
    """A step costs its window (and sinks), not its cache: NaN in older keys stays unseen."""
    q, k, v = qkv(30, Tq=Tq)
    k[:, :, sinks : 30 - (Tq + 3)] = v[:, :, sinks : 30 - (Tq + 3)] = torch.nan
    assert local_attention(q, k, v, 4, sink_tokens=sinks, backend=backend).isfinite().all()


@backends
@pytest.mark.parametrize("Tq", [1, 2])
def test_causality_is_by_absolute_position(backend, Tq):
    """Tq=1 or 2 new queries against Tk=5 keys -> query i sees keys 0..Tk-Tq+i."""
    q, k, v = qkv(5, Tq=Tq)
    out = local_attention(q, k, v, None, backend=backend)
    for i in range(Tq):
        seen = slice(0, 5 - Tq + i + 1)
        alone = reference.local_attention(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], None)
        assert error(out[:, :, i : i + 1], alone) < 1e-15


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_query_that_sees_nothing_gives_zero(backend, dtype):
    """6 queries x 10 keys, last row all False -> exactly 0, gradients 0, no NaN, other rows unchanged."""
    inputs = qkv(10, Tq=6, dtype=dtype)
    ids = torch.zeros(2, 10, dtype=torch.long)
    ids[:, -1] = -1
    out, dq, dk, dv = results(
        lambda q, k, v: local_attention(q, k, v, 7, segments=ids, backend=backend), inputs
    )
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))
    for x in (out[:, :, -1], dq[:, :, -1], dk[:, :, -1], dv[:, :, -1]):
        assert (x == 0).all()
    q, k, v = (x[:, :, :-1] for x in inputs)
    others = local_attention(q, k, v, 7, segments=ids[:, :-1], backend=backend)
    assert error(out[:, :, :-1], others) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_sink_logits_do_not_revive_a_padded_query(backend):
    """The line above, with a denominator that is not empty: the sink has no value."""
    q, k, v = qkv(5)
    ids = torch.tensor([[-1, -1, 0, 0, 0]] * 2)
    logits = torch.full((4,), 3.0, dtype=torch.float64)
    out = local_attention(q, k, v, 2, segments=ids, sink_logits=logits, backend=backend)
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:] != 0).all()


@pytest.mark.parametrize("T", [1, 127, 128, 129, 1025])
def test_tile_edges(T):
    """T in {1, 127, 128, 129, 1025}, window and position bias; mean loss -> gradients equal dense ones."""
    q, k, v = qkv(T, B=1, H=2, Hkv=1)
    bias = torch.randn(2, 17, dtype=torch.float64)
    grads = []
    for attend in (local_attention, reference.local_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        attend(*leaves[:3], 17, position_bias=leaves[3]).mean().backward()
        grads.append([x.grad for x in leaves])
    for ours, dense in zip(*grads, strict=True):
        assert ours.isfinite().all()
        assert (ours - dense).abs().max() <= 1e-12 * dense.abs().max()


@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa", "auto"])
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["B=0", "T=0"])
def test_empty_batches(backend, shape):
    """B=0, T=4; B=2, T=0 -> empty outputs of the right shape and dtype."""
    B, T = shape
    for dtype in (torch.float32, torch.bfloat16):
        inputs = qkv(T, B=B, dtype=dtype)
        for ids in (None, torch.zeros(B, T, dtype=torch.long)):
            out, *_ = results(
                lambda q, k, v, s=ids: local_attention(q, k, v, 2, segments=s, backend=backend), inputs
            )
            assert out.shape == (B, 4, T, 3)
            assert out.dtype == dtype


def test_empty_batches_with_every_option():
    """The line above, with sinks and biases: their gradients are zero."""
    for B, T in ((0, 40), (2, 0)):
        kwargs, leaves = options("all", T, 2, B=B)
        extra = [kwargs.pop(name) for name in leaves]

        def f(q, k, v, sink, bias, rest=kwargs):
            return local_attention(q, k, v, 2, sink_logits=sink, position_bias=bias, **rest)

        *_, dsink, dbias = results(f, [*qkv(T, B=B), *extra])
        assert not dsink.any()
        assert not dbias.any()


def views(x):
    """The same values as a transposed, a strided, a sliced and an expanded view."""
    wide = torch.zeros(*x.shape[:2], 2 * x.shape[2], x.shape[3] + 2, dtype=x.dtype)
    wide[:, :, ::2, 1:-1] = x
    shared = x[:1].expand(x.shape)
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "strided": wide[:, :, ::2, 1:-1],
        "columns first": x.mT.contiguous().mT,
        "expanded": shared,
    }


@backends
@pytest.mark.parametrize("kind", ["transposed", "strided", "columns first", "expanded"])
@pytest.mark.parametrize("D", [1, 3, 33, 80])
def test_any_memory_layout(backend, kind, D):
    """q, k, v and mask as transposed, strided, expanded, sliced views, odd head sizes -> equal to copies."""
    odd = [views(x)[kind] for x in qkv(37, D)]
    ids = torch.arange(74).expand(2, 74)[:, ::2] // 40
    for segments in (None, ids):
        found, wanted = (
            results(
                lambda q, k, v, s=segments: local_attention(q, k, v, 7, segments=s, backend=backend), inputs
            )
            for inputs in (odd, [x.contiguous() for x in odd])
        )
        for one, other in zip(found, wanted, strict=True):
            assert error(one, other) < 1e-13


@backends
def test_gradients_of_any_layout(backend):
    """The line above for what flows back: an expanded and a transposed cotangent."""
    inputs = [x.requires_grad_() for x in qkv(37)]
    out = local_attention(*inputs, 7, backend=backend)
    wanted = reference.local_attention(*inputs, 7)
    for cotangent in (
        torch.ones(1, dtype=out.dtype).expand(out.shape),
        torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2),
    ):
        found = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
        expected = torch.autograd.grad(wanted, inputs, cotangent, retain_graph=True)
        assert all(error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True))


@backends
def test_query_heads_share_key_heads_in_order(backend):
    """4 query heads, 2 key heads, window; prefill and decode -> heads 0, 1 use key head 0 and 2, 3 use 1."""
    q, k, v = qkv(20)
    v[:, 0], v[:, 1] = 10.0, 20.0
    for Tq in (20, 1):
        out = local_attention(q[:, :, -Tq:], k, v, 3, backend=backend)
        assert error(out[:, :2], torch.full_like(out[:, :2], 10.0)) < 1e-14
        assert error(out[:, 2:], torch.full_like(out[:, 2:], 20.0)) < 1e-14
    with pytest.raises(InputError, match="must divide"):
        local_attention(q[:, :3], k, v, 3, backend=backend)


@backends
def test_sink_tokens_forward_equals_steps(backend):
    """s=2 sinks, w=4, T=12: one forward against 12 steps -> the same; counted once inside the window."""
    q, k, v = qkv(12)
    whole = local_attention(q, k, v, 4, sink_tokens=2, backend=backend)
    for t in range(12):
        step = local_attention(
            q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], 4, sink_tokens=2, backend=backend
        )
        assert error(step, whole[:, :, t : t + 1]) < 1e-14
    inside = local_attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], 4, backend=backend)
    assert error(whole[:, :, :4], inside) < 1e-14


@backends
@pytest.mark.parametrize("B", [1, 2])
def test_packed_documents_are_apart(backend, B):
    """Docs of 6 and 6 tokens; change the last token of doc 1 -> doc 2's outputs and gradients do not move."""
    inputs = qkv(12, B=B)
    ids = (torch.arange(12) // 6).expand(B, 12)

    def f(q, k, v):
        return local_attention(q, k, v, 9, segments=ids, sink_tokens=1, backend=backend)[:, :, 6:]

    before = results(f, inputs)
    for x in inputs:
        x[:, :, 5] += 1
    after = results(f, inputs)
    for one, other in zip(after, before, strict=True):
        assert one.equal(other)
    assert all((x[:, :, :6] == 0).all() for x in after[1:])


def test_documents_equal_their_own_runs():
    """Documents shorter than the window, in one row -> each equals its own separate run."""
    inputs = qkv(40)
    lengths = (2, 1, 5, 32)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, 40)

    def apart(q, k, v):
        parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([reference.local_attention(*part, 7) for part in parts], dim=2)

    agree(lambda q, k, v: local_attention(q, k, v, 7, segments=ids, backend="blocked"), apart, inputs, 1e-13)
