"""Rotary position embedding (arXiv 2104.09864), half-split pairs (i, i + D/2)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/D), each (..., T, 1, D/2) in float64-exact float32, for (B, T, H, D) inputs.

    positions: (T,) or (B, T) integers.
    """
    rates = base ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width)
    angles = (positions.to(torch.float64)[..., None] * rates)[..., None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) rotated by its token's angles; computed in at least float32, returned in x's dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    first, second = x.to(dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
