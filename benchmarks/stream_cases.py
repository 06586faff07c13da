"""A write of several streams and what the next sublayer takes of them, for `operators.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from operator_cases import By, Case, copying, forward, two
from torch import Tensor

from twoaxis import ops


def passes(dtype: torch.dtype) -> Iterator[Case]:
    """A write of streams and what the next sublayer takes of them, forward, in one pass and one by one."""
    n, d, lead = 4, 512, (4, 512)
    X, y = torch.randn(*lead, n, d).to(dtype), torch.randn(*lead, d).to(dtype)
    given = (X, torch.randn(*lead, n, n), torch.randn(*lead, n), y)
    hyper = (torch.randn(d, n + 2) / d, torch.randn(n, n + 2), torch.ones(()), torch.ones(()), torch.ones(d))
    mhc = (torch.randn(n * d, n * n + 2 * n) / d, torch.ones(3), torch.randn(n * n + 2 * n), torch.ones(d))

    def hyper_by_one(X: Tensor, M: Tensor, b: Tensor, y: Tensor, W: Tensor, *learned: Tensor) -> Tensor:
        X = ops.stream_write(X, M, b, y)
        w = ops.hyper_gates(ops.stream_scores(X, W, 1e-6), *learned[:-1])[0]
        return ops.stream_read(X, w, gain=learned[-1], eps=1e-6)

    def mhc_by_one(X: Tensor, M: Tensor, b: Tensor, y: Tensor, phi: Tensor, *learned: Tensor) -> Tensor:
        X = ops.stream_write(X, M, b, y)
        w = ops.mhc_gates(ops.joint_scores(X, phi, 1e-6), *learned[:-1], n)[0]
        return ops.stream_read(X, w, gain=learned[-1], eps=1e-6)

    for name, one, by_one, learned in (
        ("hyper", ops.hyper_pass, hyper_by_one, hyper), ("mhc", ops.mhc_pass, mhc_by_one, mhc),
    ):  # fmt: skip
        fs = two(lambda *xs, one=one: one(*xs[:-1], gain=xs[-1]))
        fs["one by one"] = By("native", by_one)
        runs = {who: forward(f, (*given, *learned)) for who, f in fs.items()}
        yield f"{name}_pass, n=4 streams of (4, 512, 512), forward", runs | copying(2 * n + 2, y)
