"""Windowed attention by kernels that take `window_size=(left, right)`: flash-attention and torch's varlen.

Both count the keys before the query's own (left = w - 1), align the queries to the last keys, and take packed
rows with cumulative lengths, by which documents are told apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..conventions import window_for

Kernel = Callable[..., Any]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    segments: Tensor | None,
    backend: str,
    kernel: Kernel | None = None,
) -> Tensor:
    """`local_attention` on checked arguments by "flash" or "varlen"; padded queries are not yet zero.

    kernel: what to call in place of the library's packed function.
    """
    kernel = kernel or require(backend, q)
    cu_q, cu_k, longest_q, longest_k = lengths(segments, q.shape[0], q.shape[2], k.shape[2], q.device)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B T, heads, D)
    left = window_for("flash-attention" if backend == "flash" else "torch-varlen", window)
    if backend == "flash":
        out = kernel(
            *packed, cu_q, cu_k, longest_q, longest_k, dropout_p=0.0, softmax_scale=scale, causal=True,
            window_size=(left, 0),
        )  # fmt: skip
    else:
        out = kernel(
            *packed, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=(left, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    unpacked: Tensor = out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
    return unpacked


def lengths(
    segments: Tensor | None, B: int, Tq: int, Tk: int, device: torch.device
) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths of queries and keys, (N + 1,) int32, and the longest of each.

    A run of equal ids is a sequence; its queries are those among the last Tq positions of its row. Refused:
    an id that comes back after another in its row, which would be one document in two sequences.
    """
    if segments is None:
        rows = torch.arange(B + 1, dtype=torch.int32, device=device)
        return rows * Tq, rows * Tk, Tq, Tk
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    for ids, first in zip(segments, begins):
        own = ids[first & (ids >= 0)]
        if len(own.unique()) != len(own):
            raise InputError(
                "segments: a document is interrupted by another one, which packed kernels cannot tell; "
                "use backend='blocked'"
            )
    run = begins.flatten().cumsum(0) - 1  # the sequence of each key
    count = int(begins.sum())
    asks = (torch.arange(Tk, device=device) >= Tk - Tq).expand(B, -1).flatten()
    sizes = [torch.bincount(x, minlength=count) for x in (run[asks], run)]
    cu_q, cu_k = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in sizes)
    return cu_q, cu_k, int(sizes[0].max()), int(sizes[1].max())


def require(backend: str, q: Tensor) -> Kernel:
    """The library's kernel, or InputError saying what it needs."""
    kernel = find(backend)
    if kernel is None:
        raise InputError(f"backend={backend!r} is not installed here: use 'auto'")
    if not fits(q):
        raise InputError(
            f"backend={backend!r} runs on a GPU in float16 or bfloat16, not on {q.device.type} in {q.dtype}: "
            "use 'auto'"
        )
    return kernel


def fits(q: Tensor) -> bool:
    """Whether the kernels take this device and dtype."""
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


@functools.cache
def find(backend: str) -> Kernel | None:
    """The packed function of a library, or None if it is not installed."""
    try:
        if backend == "flash":
            from flash_attn import flash_attn_varlen_func as kernel  # type: ignore[import-not-found]
        else:
            from torch.nn.attention.varlen import varlen_attn as kernel
    except ImportError:
        return None
    found: Kernel = kernel
    return found
