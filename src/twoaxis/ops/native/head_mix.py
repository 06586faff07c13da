"""`head_mix` by the kernel of `token_mix`: its sources are heads, cut into rows, its weights are those of all rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .call import address, checked, threads
from .token_mix import Call

if TYPE_CHECKING:
    from ..head_pull import HeadMixed

_FLOAT = torch.float32
ROW = 512  # numbers: 16 rows, as many as the kernel takes side by side, stay in the nearest cache


def mixed(lib: ctypes.CDLL, weight: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """sum_m R_m x_m (H, L) of x_m (H_m, L), float32 or bfloat16, alike, by float32 R (H, sum of H_m)."""
    rows = [x.contiguous() for x in rows]
    (made_heads, n), (_, length), dtype = weight.shape, rows[0].shape, rows[0].dtype
    made, turned = torch.empty(made_heads, length, dtype=dtype), weight.flip(0).mT.contiguous()
    last = (address(turned, _FLOAT, (n, made_heads)) or 0) + 4 * (
        made_heads - 1
    )  # of each head's weights the first
    heads = [at for x in rows for at in _heads(x, dtype, length)]
    _run(
        lib, heads, range(last, last + 4 * n * made_heads, 4 * made_heads), _heads(made, dtype, length), made
    )
    return made


def gathered(lib: ctypes.CDLL, left: Sequence[tuple[HeadMixed, int]], sizes: Sequence[int]) -> list[Tensor]:
    """sum over mixes of R_m^T g, (H_m, L), of a source m that they saw and of those before it, by their heads."""
    g = left[0][0].g
    length, dtype = g.shape[1], g.dtype
    made = [torch.empty(heads, length, dtype=dtype) for heads in sizes]
    into = [
        at for x in made for at in reversed(_heads(x, dtype, length))
    ]  # as weights lie, from the last one back
    sources: list[int] = []
    places: list[int] = []
    for mix, i in left:
        H, n = mix.weight.shape
        last = (address(mix.weight, _FLOAT, (H, n)) or 0) + 4 * (mix.ends[i] - 1)
        if sum(sizes) > mix.ends[i]:
            raise TypeError("a kernel reads weights of sources that a mix saw")
        places += range(last, last + 4 * n * H, 4 * n)
        sources += _heads(mix.g, dtype, length)
    _run(lib, sources, places, into, g)
    return made


def _heads(x: Tensor, dtype: torch.dtype, length: int) -> Sequence[int]:
    """Where each head of a contiguous (H, L) is, L > 0."""
    at, size = address(x, dtype, (len(x), length)) or 0, length * x.element_size()
    return range(at, at + len(x) * size, size)


def _run(
    lib: ctypes.CDLL, heads: Sequence[int], places: Sequence[int], made: Sequence[int], like: Tensor
) -> None:
    """Sums of heads at these addresses, as long as those of `like`; places: of their weights in the first sum, which
    those in the others stand before."""
    n, count, length = len(heads), len(made), like.shape[1]
    d = _row(length)
    tables = [(ctypes.c_void_p * len(every))(*every) for every in (heads, places, made)]
    strides = (ctypes.c_int64 * n)()  # 0: one weight for all rows
    call = Call(n=n, N=length // d, d=d, O=count, threads=max(1, min(threads(), length // d // 4)))
    call.sources, call.weighted, call.sums = (ctypes.addressof(x) for x in tables)
    call.strides = ctypes.addressof(strides)
    checked(lib.token_mix(ctypes.byref(call), int(like.dtype == torch.bfloat16)))


@lru_cache
def _row(length: int) -> int:
    """The longest row that a head is cut into evenly."""
    return max(d for d in range(1, min(length, ROW) + 1) if length % d == 0)
