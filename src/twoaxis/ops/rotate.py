"""Turning pairs of features by given angles (rotary positions, arXiv 2104.09864), half-split pairs (i, i + R)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .native import rotate as native
from .second_order import by_torch


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, T, H, D) turned by its token's angles, computed in at least float32, returned in x's dtype.

    cos, sin: (..., T, 1, R). Angles for fewer than D features (2 R < D) turn the first ones and leave the rest. Kept
    for backward are the angles.
    """
    if (lib := native.library(x, cos, sin)) is None:
        return _plain(x, cos, sin)
    if not torch.is_grad_enabled():
        return native.run(lib, x, cos, sin, back=False)
    turned: Tensor = _Rotate.apply(lib, x, cos, sin)
    return turned


def _plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r, dtype = 2 * cos.shape[-1], x.dtype
    whole = r == x.shape[-1]
    first, second = (x if whole else x[..., :r]).to(cos.dtype).chunk(2, -1)
    left, right = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    turned = torch.cat((left, right), -1).to(dtype)
    return turned if whole else torch.cat((turned, x[..., r:]), -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lib: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.lib = lib
        ctx.save_for_backward(cos, sin)
        return native.run(lib, x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if by_torch(grad):
            return None, _plain(grad, cos, -sin), None, None
        return None, native.run(ctx.lib, grad, cos, sin, back=True), None, None
