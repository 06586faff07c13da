"""However tokens are fed, the same logits: one file over every depth method with every block and window.

`pytest` takes pairs of a method and a block, with a window and a chunk size in turn, and feeds in other ways
than chunks only methods with their defaults and those that look over tokens; `pytest -m full` takes every
method with every block, every window and every chunk size (`tests/test_full_feeding.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as remember
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from configurations import SEQUENCES, VOCAB, Case, pairwise, tokens

T = 13
WINDOWS = [1, 2, 7, T, T + 5]
SIZES = [1, 3, 4, 5, 8, None]  # of chunks; None is all at once
Point = tuple[Case, list[int | None]]


def windows(case: Case) -> list[int | None]:
    """The windows that a case is tried with; one without windows has nothing to replace."""
    return list(WINDOWS) if "window=" in str(SEQUENCES[case.sequence]) else [None]


def in_turn(cases: Sequence[Case]) -> list[Point]:
    """Every case once, each with the next window and the next chunk size."""
    window, sizes = cycle([7, 2, 1, T, 7, 2, 1, T + 5]), cycle([[3], [1], [8], [4], [None], [5], [1]])
    return [
        (Case(c.depth, c.sequence, None if windows(c) == [None] else next(window)), next(sizes))
        for c in cases
    ]


POINTS = in_turn(pairwise())
CASES = [case for case, _ in POINTS if "(" not in case.depth or case.depth.startswith("ddl")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"case", "sizes"} <= set(metafunc.fixturenames):
        points = metafunc.module.POINTS
        metafunc.parametrize(("case", "sizes"), points, ids=[f"{c} - {_names(s)}" for c, s in points])
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", metafunc.module.CASES, ids=str)


def _names(sizes: list[int | None]) -> str:
    return "+".join("all" if size is None else str(size) for size in sizes)


@remember
def build(case: Case) -> twoaxis.Decoder:
    return case.model()


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def fed(model: twoaxis.Decoder, x: Tensor, sizes: Sequence[int], cache: Any, **given: Tensor) -> Tensor:
    """Logits of x fed in pieces; `given` is cut like x."""
    pieces = zip(x.split(list(sizes), 1), *(t.split(list(sizes), 1) for t in given.values()), strict=True)
    return torch.cat([model(p, cache=cache, **dict(zip(given, g, strict=True))) for p, *g in pieces], 1)


def chunks(length: int, size: int | None) -> list[int]:
    size = size or length
    return [size] * (length // size) + ([length % size] if length % size else [])


@torch.no_grad()
def test_chunks(case: Case, sizes: list[int | None]) -> None:
    # pitfall (KV cache): every chunking gives the same logits at every position, in one forward of every length
    w, model = case.window or 4, build(case)
    x = tokens(2, 3 * w + 1)
    whole = model(x)
    for length in {1, w - 1, w, w + 1, 2 * w} - {0}:
        same(model(x[:, :length]), whole[:, :length])
    for number, size in enumerate(sizes):
        cache = model.new_cache(2, max_length=None if number % 2 else x.shape[1])
        same(fed(model, x, chunks(x.shape[1], size), cache), whole)
        assert cache.length == x.shape[1]


@torch.no_grad()
def test_rollback_and_redo(case: Case) -> None:
    # pitfall (KV cache, Local convolution state): draft 3, reject 2; draft 3, reject all: as if never drafted
    w, model = case.window or 4, build(case)
    x, other = tokens(2, w + 7), tokens(2, 3, seed=5)
    whole, cache = model(x), model.new_cache(2, max_rollback=3)
    fed(model, x[:, :w], [w], cache)
    drafted = torch.cat((x[:, : w + 1], other[:, :2]), 1)
    same(fed(model, drafted[:, w:], [1, 2], cache), model(drafted)[:, w:])
    cache.drop_last(2)
    same(fed(model, x[:, w + 1 : w + 3], [1, 1], cache), whole[:, w + 1 : w + 3])
    fed(model, other, [3], cache)
    cache.truncate_to(w + 3)
    same(fed(model, x[:, w + 3 :], [3, 1], cache), whole[:, w + 3 :])
    cache.truncate_to(0)
    same(fed(model, x, [w, 7], cache), whole)


@torch.no_grad()
def test_beams(case: Case) -> None:
    # pitfall (KV cache): 3 beams, parents (2, 0, 0) then (1, 1, 2): as each beam's own tokens from scratch
    w, model = case.window or 4, build(case)
    rows, cache = tokens(3, w + 1), model.new_cache(3)
    model(rows, cache=cache)
    for step, parents in enumerate(([2, 0, 0], [1, 1, 2])):
        cache.reorder(torch.tensor(parents))
        new = tokens(3, 1, seed=step)
        rows = torch.cat((rows[parents], new), 1)
        same(model(new, cache=cache)[:, -1], model(rows)[:, -1])


@torch.no_grad()
def test_left_padding(case: Case) -> None:
    # pitfall (Positions): left-padded rows of 3 and 7 tokens, then more: each row equals its own run
    w, model = case.window or 4, build(case)
    length = max(9, w + 4)
    x, index, offset = tokens(2, length), torch.arange(length), torch.tensor([[4], [0]])
    segments, positions = torch.where(index < offset, -1, 0), (index - offset).clamp(min=0)
    whole = model(x, segments=segments, positions=positions)
    same(whole[:1, 4:], model(x[:1, 4:]))
    same(whole[1:], model(x[1:]))
    same(fed(model, x, [7, 1, length - 8], model.new_cache(2), segments=segments), whole)


@torch.no_grad()
def test_packed_documents(case: Case) -> None:
    # pitfall (Packed documents): documents shorter and longer than windows and kernels, in one row
    w, model = case.window or 4, build(case)
    lengths = [5, 1, w + 2]
    x = tokens(2, sum(lengths))
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    alone = torch.cat([model(part) for part in x.split(lengths, 1)], 1)
    same(model(x, segments=ids), alone)
    same(fed(model, x, [3, 4, w + 1], model.new_cache(2), segments=ids), alone)


def test_no_tokens_leave_the_cache_unchanged(case: Case) -> None:
    # pitfall (Batches, heads): B=2, T=0: empty outputs, caches unchanged; this one feeds with gradients on
    model, x = build(case), tokens()
    cache = model.new_cache(2)
    first = model(x[:, :6], cache=cache)
    assert model(x[:, :0], cache=cache).shape == (2, 0, VOCAB)
    assert cache.length == 6
    rest = model(x[:, 6:], cache=cache)
    same(torch.cat((first, rest), 1), model(x))
    rest.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
