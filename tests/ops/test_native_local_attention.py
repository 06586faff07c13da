"""The native window attention against the reference in float64, and when it is used at all."""

import pytest
import torch
from agreement import error, results
from attention_cases import documents, options, qkv
from native_cases import needs_kernel
from torch.autograd.graph import saved_tensors_hooks

from twoaxis.errors import InputError
from twoaxis.ops import local_attention, reference

pytestmark = needs_kernel("local_attention")
NAMES = ["plain", "scale", "documents", "sink_logits"]


def compare(name, T, D, window, backend="native", dtype=torch.float32, measure=error, **shape):
    """Errors of output and gradients, the largest ones, for the same inputs every time."""
    torch.manual_seed(0)
    kwargs, leaves = options(name, T, window, torch.float32)
    inputs = [*qkv(T, D, dtype=dtype, **shape), *(kwargs.pop(name) for name in leaves)]

    def f(q, k, v, *more, attend=local_attention, **choice):
        return attend(q, k, v, window, **kwargs, **dict(zip(leaves, more, strict=True)), **choice)

    found = results(lambda *x: f(*x, backend=backend), inputs)
    exact = results(lambda *x: f(*x, attend=reference.local_attention), [x.double() for x in inputs])
    assert all(x.isfinite().all() for x in found)
    return [measure(a, b) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [1, 33, 127, 128, 129])
def test_equals_the_reference(T, name):
    for window in (1, 7, 64, None):
        assert max(compare(name, T, 24, window)) < 1e-5


@pytest.mark.parametrize("D", [1, 3, 24, 33, 80, 256])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (5, 1)], ids=["MHA", "GQA", "MQA"])
def test_head_sizes_and_groups(D, heads):
    H, Hkv = heads
    for Tq in (None, 1, 5):  # new queries against a cache
        assert max(compare("plain", 37, D, 7, H=H, Hkv=Hkv, Tq=Tq)) < 1e-5


@pytest.mark.parametrize("window", [64, 550, None])
def test_more_keys_than_a_slab(window):
    """Softmax over several slabs of 512 scores: maxima that grow and shrink, rows without a key in a slab."""
    assert max(compare("plain", 600, 16, window, B=1, H=2, Hkv=1)) < 1e-5
    assert max(compare("documents", 600, 16, window, B=2, H=1, Hkv=1)) < 1e-5
    q, k, v = qkv(700, 16, B=1, H=1, Hkv=1, dtype=torch.float32)
    for growing in (k * torch.linspace(0, 20, 700)[:, None], k * torch.linspace(20, 0, 700)[:, None]):
        found, wanted = (
            local_attention(q, growing, v, window, backend="native"),
            reference.local_attention(q.double(), growing.double(), v.double(), window),
        )
        assert error(found, wanted) < 1e-5


@pytest.mark.parametrize("window", [7, 64, None])
def test_bfloat16_is_no_worse_than_torchs_own_kernel(window):
    native, torchs = (
        compare("plain", 150, 24, window, backend, torch.bfloat16) for backend in ("native", "sdpa")
    )
    for ours, theirs in zip(native, torchs, strict=True):
        assert 0 < ours <= 1.05 * theirs


def test_large_scores_and_exact_exponentials():
    """A short polynomial would show here: scores from -80 to 80, of which only differences matter."""
    q, k, v = qkv(200, 1, B=1, H=1, Hkv=1, dtype=torch.float32)
    k[..., 0] = torch.linspace(-80, 80, 200)
    found = local_attention(torch.ones_like(q), k, v, None, scale=1.0, backend="native")
    wanted = reference.local_attention(torch.ones_like(q).double(), k.double(), v.double(), None, scale=1.0)
    assert error(found, wanted) < 2e-6


@pytest.mark.parametrize("kind", ["transposed", "strided", "columns first", "expanded"])
def test_any_memory_layout(kind):
    """q, k, v as transposed, strided, expanded, sliced views, odd head sizes -> equal to contiguous copies."""
    from test_local_attention_pitfalls import views

    for D in (1, 33):
        odd = [views(x)[kind] for x in qkv(37, D, dtype=torch.float32)]
        f = lambda q, k, v: local_attention(q, k, v, 7, backend="native")  # noqa: E731
        found, wanted = results(f, odd), results(f, [x.contiguous() for x in odd])
        assert all(error(a, b) < 1e-6 for a, b in zip(found, wanted, strict=True))


def test_gradients_of_any_layout_again_and_again():
    inputs = [x.requires_grad_() for x in qkv(37, dtype=torch.float32)]
    out, wanted = (
        f(*inputs, 7) for f in (lambda *x: local_attention(*x, backend="native"), reference.local_attention)
    )
    for cotangent in (
        torch.ones(1).expand(out.shape),
        torch.randn_like(out).transpose(1, 2).contiguous().transpose(1, 2),
        torch.randn(*out.shape[:3], 6)[..., ::2],
    ):
        found, again = (torch.autograd.grad(out, inputs, cotangent, retain_graph=True) for _ in range(2))
        expected = torch.autograd.grad(wanted, inputs, cotangent, retain_graph=True)
        assert all(error(a, b) < 1e-5 for a, b in zip(found, expected, strict=True))
        assert all(a.equal(b) for a, b in zip(found, again, strict=True))
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(out.sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["B=0", "T=0"])
def test_empty_batches(shape):
    """B=0, T=4; B=2, T=0 -> empty outputs of the right shape and dtype."""
    B, T = shape
    for dtype in (torch.float32, torch.bfloat16):
        out, *_ = results(
            lambda q, k, v: local_attention(q, k, v, 2, backend="native"), qkv(T, B=B, dtype=dtype)
        )
        assert out.shape == (B, 4, T, 3)


def test_a_query_that_sees_nothing_gives_zero():
    """Last row all False -> exactly 0, gradients 0, no NaN; a sink logit does not revive it."""
    ids = torch.zeros(2, 10, dtype=torch.long)
    ids[:, -1] = -1
    for sink in (None, torch.full((4,), 3.0)):
        found = results(
            lambda q, k, v, s=sink: local_attention(
                q, k, v, 7, segments=ids, sink_logits=s, backend="native"
            ),
            qkv(10, Tq=6, dtype=torch.float32),
        )
        assert all(x.isfinite().all() and (x[:, :, -1] == 0).all() for x in found)


def test_documents_with_any_ids():
    """Ids that agree in their lowest 32 bits are still different documents."""
    q, k, v = qkv(40, dtype=torch.float32)
    ids = documents(2, 40)
    found = local_attention(q, k, v, 7, segments=torch.where(ids < 0, ids, ids << 32), backend="native")
    assert error(found, reference.local_attention(q, k, v, 7, segments=ids)) < 1e-5


def test_threads_change_nothing():
    inputs = qkv(70, 8, dtype=torch.float32)
    f = lambda q, k, v: local_attention(q, k, v, 7, backend="native")  # noqa: E731
    one = results(f, inputs)
    torch.set_num_threads(2)
    try:
        two = results(f, inputs)
    finally:
        torch.set_num_threads(1)
    assert all(a.equal(b) for a, b in zip(one, two, strict=True))


def test_kept_are_inputs_output_and_one_number_per_query():
    inputs, kept = [x.requires_grad_() for x in qkv(70, 8, dtype=torch.float32)], {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = local_attention(*inputs, 7, backend="native")
    assert sum(kept.values()) == 4 * (sum(x.numel() for x in inputs) + out.numel() + out.numel() // 8)


def test_when_it_is_used(counting, monkeypatch):
    library = counting("local_attention")
    monkeypatch.setenv("TWOAXIS_BACKEND", "auto")
    few, many, step = (qkv(*x, dtype=torch.float32) for x in ((40, 8), (200, 8), (200, 8)))
    local_attention(*few, None)  # torch's own kernels are as fast
    local_attention(step[0][:, :, :1], *step[1:], None)
    local_attention(*many, 7, sink_tokens=1)
    local_attention(*(x.double() for x in many), 7)
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    local_attention(*many, 100)
    assert library.calls == []
    monkeypatch.setenv("TWOAXIS_BACKEND", "auto")
    local_attention(*many, 100)
    local_attention(*many, None)
    assert library.calls == ["local_attention_forward"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sink_tokens": 1}, "backend='native' has no sink_tokens"),
        ({"position_bias": torch.zeros(4, 3)}, "has no sink_tokens, position_bias or reach"),
        ({"dtype": torch.float64}, "float32 or bfloat16, not torch.float64 on cpu"),
    ],
    ids=["sinks", "bias", "float64"],
)
def test_what_it_cannot_do_is_refused(change, message):
    inputs = qkv(9, dtype=change.pop("dtype", torch.float32))
    with pytest.raises(InputError, match=message):
        local_attention(*inputs, 3, backend="native", **change)
