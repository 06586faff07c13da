"""Rotary position embedding (arXiv 2104.09864), half-split pairs (i, i + D/2).

    angle(t, i) = t * base^(-2i/D);  (x_i, x_{i+D/2}) is turned by it

Angles are products of float32 numbers, as in the public code that pretrained models were trained with (a more
exact angle would change what those models compute); in a float64 model they are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twoaxis.ops.traced import native_source
from twoaxis.tape import Array, Tape


def rotary_angles(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (..., T, 1, D/2), of positions (T,) or (B, T), for inputs (B, T, H, D) of `dtype`."""
    dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    angles = (positions.to(dtype)[..., None] * (1.0 / base**exponents))[..., None, :]
    return angles.cos(), angles.sin()


def trace_rotation(t: Tape, xs: tuple[Array, Array], heads: tuple[int, int], rotated: int) -> list[Array]:
    """`rotate` in sizes alone, of queries and keys; the angles' cos and sin are kept."""
    rows = 1 if t.decoding else t.seq_len
    angles = [t.table(rows * rotated // 2, max(4, t.itemsize), constant=True) for _ in range(2)]
    t.run("angles", (), *angles, launches=10)
    whole = [x.width == h * rotated for x, h in zip(xs, heads, strict=True)]
    if t.backend == "native" and not t.decoding and all(native_source(x, x) for x in xs):
        return [t.run("rotate", (x, *angles), t.like(x), keep=angles, native=True) for x in xs]
    return [
        t.run("rotate", (x, *angles), t.like(x), keep=angles, launches=5 if w else 6, moved=7 * x.nbytes)
        for x, w in zip(xs, whole, strict=True)
    ]
