"""Linear maps that know what a CPU is slow at: a few rows as in decoding, and bfloat16 without bfloat16 units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = (
    16  # rows up to which W x^T beats x W^T on a CPU: 1.1 to 2.2 times at 4 and 8 rows, more for wide outputs
)
BF16_UNITS = (
    torch.backends.mkldnn.is_available()
    and bool(  # torch multiplies bfloat16 in this CPU's hardware
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
)
CASTS = {torch.float32, torch.bfloat16, torch.float16}  # what autocast makes one dtype


class Linear(nn.Linear):
    """y = W x, (..., in) -> (..., out), with the weight (out, in) of `nn.Linear` and no bias."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def fitting(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a product with this weight takes x: the weight's, or autocast's if x has that already."""
    kind = x.device.type
    rounded = torch.is_autocast_enabled(kind) and x.dtype == torch.get_autocast_dtype(kind)
    return x.dtype if rounded else weight.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + b as `F.linear`, autocast included: x (..., in), weight (out, in), bias (out,) -> (..., out).

    A bfloat16 product is float32 sums of products of bfloat16 numbers, rounded once. A CPU without bfloat16
    units takes those sums one by one (6 to 14 times slower than float32): there the same sums are made
    by the float32 product of the same bfloat16 numbers.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if (
        bias is None
        and 1 < rows <= FEW
        and not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype == torch.float32
    ):
        few = torch.mm(weight, x.reshape(rows, -1).t()).t()
        return few.contiguous().view(*x.shape[:-1], -1)
    if not _emulated(x, weight, bias):
        return F.linear(x, weight, bias)
    x = x.to(torch.bfloat16)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    y: Tensor = _widened(x, weight) if traced else _Widened.apply(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def _emulated(x: Tensor, *others: Tensor | None) -> bool:
    """Whether W x would be a bfloat16 product of more than one row that this CPU emulates."""
    if BF16_UNITS or not x.is_cpu or x.numel() <= x.shape[-1]:
        return False
    dtypes = {y.dtype for y in (x, *others) if y is not None}
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16 and dtypes <= CASTS
    return dtypes == {torch.bfloat16}


class _Widened(torch.autograd.Function):
    """y = bf16(wide(x) wide(W)^T) of a bfloat16 x, where wide is float32 of bfloat16; keeps x and W, no copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _widened(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):
            g = g.float()
            gx = (g @ _wide(weight)).to(x.dtype) if of_x else None
            gw = (g.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight.dtype) if of_weight else None
        return gx, gw


def _widened(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), _wide(weight)).to(torch.bfloat16)


def _wide(weight: Tensor) -> Tensor:
    """The bfloat16 numbers of a weight, as float32."""
    return weight.to(torch.bfloat16).float()
