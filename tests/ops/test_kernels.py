"""Existing kernels behind `local_attention`: each at T = w-1, w, w+1, 2w, by one table of window conventions.

flash-attention and torch's varlen run on GPUs only. Here their packed call goes to a stand-in that records
its arguments and computes, sequence by sequence, what the library documents for them.
"""

import pytest
import torch
from agreement import error
from attention_cases import documents, qkv
from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.ops import CONVENTIONS, local_attention, reference, visible, window_for, window_from
from twoaxis.ops.backends import flash, flex

W = 5
SIZES = [W - 1, W, W + 1, 2 * W]


class Packed:
    """A kernel as documented: sequences by cumulative lengths, queries aligned to the last keys, keys
    p - left .. p + right visible to the query at position p, -1 without limit."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def __call__(self, q, k, v, cu_q, cu_k, longest_q, longest_k, **options) -> Tensor:
        self.calls.append(options)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        (left, right), out = options["window_size"], torch.zeros_like(q)
        group, scale = q.shape[1] // k.shape[1], options.get("scale", options.get("softmax_scale"))
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            Tq, Tk = int(b - a), int(d - c)
            assert 0 <= Tq <= Tk <= longest_k
            assert Tq <= longest_q
            p, s = torch.arange(Tk - Tq, Tk)[:, None], torch.arange(Tk)
            seen = s <= p + right
            if left >= 0:
                seen &= s >= p - left
            keys, values = (x[c:d].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
            scores = (q[a:b].transpose(0, 1) @ keys.mT * scale).masked_fill(~seen, -torch.inf)
            out[a:b] = (scores.softmax(-1) @ values).transpose(0, 1)
        assert (cu_q[-1], cu_k[-1]) == (len(q), len(k))
        return out


@pytest.fixture
def packed(monkeypatch) -> Packed:
    kernel = Packed()
    monkeypatch.setattr(flash, "require", lambda backend, q: kernel)
    return kernel


@pytest.mark.parametrize("window", [1, W, None], ids="w={}".format)
@pytest.mark.parametrize("Tq", [None, 1, 3], ids=["all queries", "Tq=1", "Tq=3"])
@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("backend", ["flex", "flash", "varlen", "sdpa", "blocked"])
def test_each_backend_has_our_window(backend, T, Tq, window, packed):
    # pitfall (Windows and causal masks): w counts the query's own token, the same on every backend
    q, k, v = qkv(T, 4, Tq=Tq)
    for segments in (None, documents(2, T)):
        found = local_attention(q, k, v, window, segments=segments, backend=backend)
        assert error(found, reference.local_attention(q, k, v, window, segments=segments)) < 1e-12


@pytest.mark.parametrize("backend", ["flex", "flash", "varlen", "sdpa", "blocked"])
def test_moving_one_key_moves_its_window_of_outputs(backend, packed):
    # pitfall: one layer, w=4, T=12, change token j alone: exactly positions j .. j+w-1 move
    q, k, v = qkv(12, 4, B=1, H=1, Hkv=1)
    changed = v.clone()
    changed[:, :, 3] += 1
    a, b = (local_attention(q, k, x, 4, backend=backend) for x in (v, changed))
    assert ((a - b).abs().sum((0, 1, 3)) > 0).nonzero().flatten().tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("backend", "window", "expected"),
    [("flash", 1, (0, 0)), ("flash", 64, (63, 0)), ("varlen", 64, (63, 0)), ("flash", None, (-1, 0))],
)
def test_what_packed_kernels_are_told(backend, window, expected, packed):
    local_attention(*qkv(70, 4), window, backend=backend, scale=0.3)
    (call,) = packed.calls
    assert call["window_size"] == expected
    if backend == "flash":
        assert (call["causal"], call["softmax_scale"], call["dropout_p"]) == (True, 0.3, 0.0)
    else:
        assert (call["enable_gqa"], call["scale"]) == (True, 0.3)


def test_each_document_is_a_sequence_of_its_own():
    segments = torch.tensor([[-1, 4, 4, 2, 2], [7, 7, 7, 7, 7]])
    cu_q, cu_k, longest_q, longest_k = flash.lengths(segments, 2, 2, 5, segments.device)
    assert cu_k.tolist() == [0, 1, 3, 5, 10]
    assert cu_q.tolist() == [0, 0, 0, 2, 4]  # the last two positions of each row ask
    assert (longest_q, longest_k) == (2, 5)
    with pytest.raises(InputError, match="interrupted by another"):
        flash.lengths(torch.tensor([[1, 2, 1]]), 1, 3, 3, segments.device)


@pytest.mark.parametrize("sinks", [1, 2, 7])
def test_flex_has_sink_tokens(sinks):
    q, k, v = qkv(13, 4)
    found = local_attention(q, k, v, 3, sink_tokens=sinks, backend="flex")
    assert error(found, reference.local_attention(q, k, v, 3, sink_tokens=sinks)) < 1e-12


def test_flex_keeps_the_block_mask_of_a_shape():
    flex._window_mask.cache_clear()
    for _ in range(3):
        local_attention(*qkv(9, 4), 3, backend="flex")
    local_attention(*qkv(9, 4), 4, backend="flex")
    assert flex._window_mask.cache_info()[:2] == (2, 2)  # hits, misses


def test_flex_refuses_gradients_on_a_cpu():
    q, k, v = (x.requires_grad_() for x in qkv(6, 4))
    with pytest.raises(InputError, match="no gradients on a CPU"):
        local_attention(q, k, v, 3, backend="flex")
    with torch.no_grad():  # torch itself refuses leaves that require a gradient even here
        found = local_attention(q, k, v, 3, backend="flex")
    assert error(found, reference.local_attention(q, k, v, 3).detach()) < 1e-12


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in compiling
@pytest.mark.parametrize("segmented", [False, True], ids=["window", "documents"])
def test_flex_compiled(segmented):
    q, k, v = qkv(300, 32, dtype=torch.float32)
    segments = documents(2, 300) if segmented else None
    expected = reference.local_attention(q, k, v, 64, segments=segments)
    found = flex.attend(q, k, v, 64, 32**-0.5, segments, 0, compiled=True)
    if segments is not None:
        found = found.masked_fill((segments < 0)[:, None, :, None], 0.0)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_what_a_cpu_cannot_run_is_refused(backend):
    with pytest.raises(InputError, match=f"backend='{backend}' (is not installed|runs on a GPU)"):
        local_attention(*qkv(6, 4), 3, backend=backend)


@pytest.mark.parametrize("backend", ["flex", "flash", "varlen", "sdpa"])
def test_options_that_a_kernel_lacks_are_refused(backend, packed):
    q, k, v = qkv(6, 4)
    for option in ({"sink_logits": torch.zeros(4)}, {"position_bias": torch.zeros(4, 3)}):
        with pytest.raises(
            InputError, match=f"backend='{backend}' has no sink_logits, position_bias or reach"
        ):
            local_attention(q, k, v, 3, backend=backend, **option)
    if backend in ("flash", "varlen"):
        with pytest.raises(InputError, match="has no sink_tokens"):
            local_attention(q, k, v, 3, backend=backend, sink_tokens=1)


@pytest.mark.parametrize("installed", [["flash", "varlen"], ["varlen"], []], ids=str)
def test_a_bare_window_takes_the_best_kernel_that_runs(installed, packed, monkeypatch):
    monkeypatch.setattr(flash, "fits", lambda q: True)
    monkeypatch.setattr(flash, "find", lambda name: packed if name in installed else None)
    q, k, v = qkv(100, 4)
    local_attention(q, k, v, 8)
    assert len(packed.calls) == (1 if installed else 0)
    if installed:
        assert ("causal" in packed.calls[0]) == (installed[0] == "flash")
    for other in ({"window": 100}, {"window": 8, "sink_tokens": 1}):
        local_attention(q, k, v, **other)
    assert len(packed.calls) == (1 if installed else 0)


@pytest.mark.parametrize("library", CONVENTIONS)
def test_conventions_there_and_back(library):
    for window in (1, 2, 64, None):
        assert window_from(library, window_for(library, window)) == window


def test_conventions_are_these():
    # a window of 64 tokens, the current one included, in each library's number
    assert {name: window_for(name, 64) for name in CONVENTIONS} == {
        "transformers": 64,
        "vllm": 64,
        "xformers-causal": 64,
        "xformers-local": 63,
        "flash-attention": 63,
        "torch-varlen": 63,
        "nanochat": 63,
        "local-attention": 63,
    }
    with pytest.raises(InputError, match="'flash' is not in the table; known: transformers"):
        window_for("flash", 3)
    with pytest.raises(InputError, match="window=0"):
        window_from("transformers", 0)


def test_transformers_means_our_window():
    masks = pytest.importorskip("transformers.masking_utils")
    seen = masks.sliding_window_causal_mask_function(window_for("transformers", 4))
    at = torch.arange(9)
    found = seen(torch.tensor(0), torch.tensor(0), at[:, None], at)
    assert found.equal(visible(9, 9, 4))
