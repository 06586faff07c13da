"""Attention by matrix tiles: the kernel on emulated tiles against the reference, and when it is chosen.

This shows the kernel right, given tiles that do what Intel documents; on a processor that has them the kernel is
compared with vectors before it is used, and `twoaxis verify --backends` with the reference.
"""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from agreement import error, results
from attention_cases import qkv
from native_cases import needs_kernel
from test_native_local_attention import compare

from twoaxis.ops import choice, local_attention
from twoaxis.ops.native import build, levels, tiles
from twoaxis.ops.native import local_attention as native

pytestmark = needs_kernel("local_attention")
HALF = torch.bfloat16
FLAGS = levels.FLAGS[levels.level()]  # without the tiles' own: emulated


@pytest.fixture(scope="module")
def emulated():
    return build.library("local_attention_tiles", FLAGS)


@pytest.fixture
def tiled(emulated, monkeypatch):
    """Calls in bfloat16 go to the kernel on emulated tiles."""
    monkeypatch.setattr(tiles, "_settled", [emulated])
    return emulated


@pytest.fixture
def unsettled(monkeypatch):
    monkeypatch.setattr(tiles, "_settled", [])


def both(found, exact):
    """The largest error, and the root of the mean square."""
    difference = found.double() - exact
    return error(found, exact), difference.square().mean().sqrt().item()


def no_worse(name, T, D, window, **shape):
    """Outputs and gradients have bfloat16's error; on average that of torch's own kernel, where it has the option."""
    found = compare(name, T, D, window, dtype=HALF, measure=both, **shape)
    assert max(most for most, _ in found) < 0.02  # torch's reaches 0.011
    if name in ("plain", "scale"):
        torchs = compare(name, T, D, window, "sdpa", HALF, both, **shape)
        for (_, ours), (_, theirs) in zip(found, torchs, strict=True):
            assert ours <= 1.05 * theirs + 1e-6


@pytest.mark.parametrize("D", [24, 33, 64])
@pytest.mark.parametrize("T", [1, 33, 129])
def test_equals_the_reference(T, D, tiled):
    for window in (1, 7, 32, None) if T == 33 else (33, 64):
        no_worse("plain", T, D, window)


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "scale", "documents", "sink_logits"])
@pytest.mark.parametrize("T", [1, 31, 32, 33, 64, 65, 129])
@pytest.mark.parametrize("D", [1, 24, 33, 64])
def test_equals_the_reference_everywhere(D, T, name, tiled):
    for window in (1, 7, 31, 32, 33, 63, 64, 65, None):
        no_worse(name, T, D, window)


@pytest.mark.parametrize("name", ["scale", "documents", "sink_logits"])
def test_options(name, tiled):
    for window in (7, None):
        no_worse(name, 70, 24, window)


@pytest.mark.parametrize(
    ("D", "shape"),
    [(80, {"H": 5, "Hkv": 1}), (24, {"H": 6, "Hkv": 6, "Tq": 5}), (33, {"H": 6, "Hkv": 2, "Tq": 34}), (256, {})],
    ids=["MQA", "few queries", "GQA behind a cache", "widest"],
)  # fmt: skip
def test_heads_and_queries(D, shape, tiled):
    for window in (7, None):
        no_worse("plain", 37, D, window, **shape)


@pytest.mark.parametrize("window", [64, 290, None])
def test_more_keys_than_a_slab(window, tiled):
    """Maxima that grow and shrink from slab to slab of 256 scores, and rows that see nothing of a slab."""
    no_worse("plain", 300, 16, window, B=1, H=1, Hkv=1)
    no_worse("documents", 300, 16, window, B=2, H=1, Hkv=1)
    q, k, v = qkv(300, 16, B=1, H=1, Hkv=1, dtype=HALF)
    for ends in ((0, 20), (20, 0)):
        growing = k * torch.linspace(*ends, 300)[:, None].to(HALF)
        exact = local_attention(*(x.double() for x in (q, growing, v)), window, backend="reference")
        found = local_attention(q, growing, v, window, backend="native")
        assert (found - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("kind", ["transposed", "strided", "columns first", "expanded"])
def test_any_memory_layout(kind, tiled):
    from test_local_attention_pitfalls import views

    odd = [views(x)[kind] for x in qkv(37, 33, dtype=HALF)]
    f = lambda q, k, v: local_attention(q, k, v, 7, backend="native")  # noqa: E731
    assert all(map(torch.equal, results(f, odd), results(f, [x.contiguous() for x in odd])))


def test_threads_empty_batches_and_queries_that_see_nothing(tiled):
    f = lambda q, k, v: local_attention(q, k, v, 7, backend="native")  # noqa: E731
    inputs = qkv(70, 8, dtype=HALF)
    one = results(f, inputs)
    torch.set_num_threads(2)
    try:
        assert all(map(torch.equal, one, results(f, inputs)))
    finally:
        torch.set_num_threads(1)
    assert results(f, qkv(4, B=0, dtype=HALF))[0].shape == (0, 4, 4, 3)
    ids = torch.zeros(2, 10, dtype=torch.long)
    ids[:, -1] = -1
    g = lambda q, k, v: local_attention(q, k, v, 7, segments=ids, backend="native")  # noqa: E731
    found = results(g, qkv(10, Tq=6, dtype=HALF))
    assert all(x.isfinite().all() and (x[:, :, -1] == 0).all() for x in found)


def test_only_bfloat16_goes_to_tiles(counting, monkeypatch):
    library, others = counting("local_attention"), []
    monkeypatch.setattr(tiles, "chosen", lambda vectors, results: others.append(vectors) or vectors)
    local_attention(*qkv(70, 8, dtype=torch.float32), 7)
    assert others == []
    local_attention(*qkv(70, 8, dtype=HALF), 7)
    assert others == [library]
    assert library.calls == ["local_attention_forward"] * 2


def test_a_processor_without_tiles_takes_vectors(unsettled, monkeypatch, caplog):
    monkeypatch.setattr(levels, "available", lambda: ("avx512", "avx2", "plain"))
    vectors = choice.library("local_attention")
    assert tiles.chosen(vectors, native._small) is vectors
    assert native.settle(vectors) == "this processor has no matrix tiles"
    monkeypatch.setattr(tiles, "_settled", [])
    monkeypatch.setattr(levels, "available", lambda: ("amx", "avx512", "avx2", "plain"))
    monkeypatch.setenv("TWOAXIS_NATIVE", "avx512")
    assert native.settle(vectors) == "TWOAXIS_NATIVE asks for less"
    assert caplog.messages == []


def refuse(*_):
    raise build.UnavailableError("g++ cannot compile local_attention_tiles.cpp: error: -mamx-tile")


REASONS = {  # what is built, by how much its results are off, and why it is not taken
    "right": (None, 1, ""),
    "rounded otherwise": (None, 1.004, ""),
    "wrong": (None, 1.05, r"they differ from vectors by [45]\..e-02 of the largest entry, more than 0\.02"),
    "NaN": (None, float("nan"), "they differ from vectors by nan"),
    "not permitted": (lambda *_: SimpleNamespace(local_attention_permitted=lambda: False), 1, "does not permit them"),
    "not built": (refuse, 1, r"cannot compile local_attention_tiles\.cpp"),
}  # fmt: skip


@pytest.mark.parametrize(("build_it", "factor", "reason"), REASONS.values(), ids=REASONS)
def test_tiles_are_taken_once_they_prove_right(
    build_it, factor, reason, emulated, unsettled, monkeypatch, caplog
):
    monkeypatch.setattr(levels, "level", lambda: "amx")
    monkeypatch.setattr(tiles, "built", build_it or (lambda *_: emulated))
    vectors, calls = choice.library("local_attention"), []

    def off(library):
        calls.append(library)
        return [x * factor if library is emulated else x for x in native._small(library)]

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert tiles.chosen(vectors, off) is (vectors if reason else emulated)
    assert calls == ([] if build_it else [emulated, vectors])
    assert len(caplog.messages) == bool(reason)
    assert re.search(reason, native.settle(vectors))
    if reason:
        assert caplog.messages == [
            f"attention in bfloat16 runs without matrix tiles: {native.settle(vectors)}"
        ]
