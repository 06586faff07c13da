"""What `operators.py` compares of DeepCrossAttention's read: by itself, and as the decoder's loop runs its backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from operator_cases import Case, Run, copying

from twoaxis.ops import choice, gated_mix, known_gates
from twoaxis.ops.native import gated_mix as native
from twoaxis.ops.owed import Sums

READS = 3  # of a block: for queries, keys and values


def run_of(
    backend: str, backward: bool, b: torch.Tensor, w: torch.Tensor, xs: tuple[torch.Tensor, ...]
) -> Run:
    """The reads, with all gradients if `backward`; the backend is settled for both passes."""
    cotangents = [torch.randn_like(xs[0]) for _ in w]

    def run() -> object:
        with choice.requesting(backend), torch.set_grad_enabled(backward):
            reads = gated_mix(xs, b, w)
            return torch.autograd.grad(reads, (b, w, *xs), cotangents) if backward else reads

    return run


def gated(dtype: torch.dtype, n: int = 13, d: int = 512) -> Iterator[Case]:
    """Three reads of n sources of (4, 512, d), b by feature, and the gradient of a source that n blocks saw."""
    xs = tuple(torch.randn(4, 512, d).to(dtype).requires_grad_() for _ in range(n))
    b, w = torch.ones(READS, n, d).requires_grad_(), (0.05 * torch.randn(READS, d)).requires_grad_()
    for backward, moved in ((False, n + READS), (True, 3 * n + 2 * READS)):
        runs = {who: run_of(who, backward, b, w, xs) for who in ("native", "plain")}
        name = f"{READS} gated reads of {n} sources of (4, 512, {d}), forward{' + backward' * backward}"
        yield name, runs | copying(moved, xs[0])
    yield from pull(n, xs[0].detach().flatten(0, 1))


def pull(n: int, x: torch.Tensor) -> Iterator[Case]:
    """One source's gradient from n blocks, with those of their weights."""
    sums, every = (Sums(0), Sums(0)), []
    for _ in range(n):
        grads = [torch.randn(x.shape).to(x.dtype) for _ in range(READS)]
        b, w = torch.ones(READS, 1, x.shape[1]), 0.05 * torch.randn(READS, x.shape[1])
        every += known_gates.Gated(sums, (0, 0), None, b, w, list(grads)).parts(0)
    runs: dict[str, Run] = {"plain": partial(known_gates.gathered, None, x, every)}
    library = choice.library("gated_pull")
    if library is not None:
        runs = {"native": partial(native.gathered, library, None, x, every), **runs}
    yield f"a source's gradient from {READS * n} such reads", runs | copying(READS * n + 2, x)
