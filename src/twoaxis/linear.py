"""Linear maps that know what a CPU is slow at: a few rows as in decoding, and bfloat16 without bfloat16 units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.ops.choice import ordinary, transformed
from twoaxis.ops.precision import BF16_UNITS, autocast_dtype
from twoaxis.ops.transpose import transposed

FEW = (
    16  # rows up to which W x^T beats x W^T on a CPU: 1.1 to 2.2 times at 4 and 8 rows, more for wide outputs
)
MANY = 64  # rows from which the weight's gradient is worth a transposed copy
CASTS = {torch.float32, torch.bfloat16, torch.float16}  # what autocast makes one dtype


class Linear(nn.Linear):
    """y = W x, (..., in) -> (..., out), with the weight (out, in) of `nn.Linear` and no bias."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def fitting(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a product with this weight takes x: the weight's, or autocast's if x has that already."""
    return x.dtype if x.dtype == autocast_dtype(x) else weight.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + b as `F.linear`, autocast included: x (..., in), weight (out, in), bias (out,) -> (..., out).

    A bfloat16 product is float32 sums of products of bfloat16 numbers, rounded once. A CPU without bfloat16
    units takes those sums one by one (6 to 14 times slower than float32): there the same sums are made
    by the float32 product of the same bfloat16 numbers. A CPU with them is slow at the weight's gradient g^T x: there
    g is transposed first.
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
    if _turns(x, weight, bias):
        turned: Tensor = _Turned.apply(x.to(torch.bfloat16), weight.to(torch.bfloat16))
        return turned
    if not _emulated(x, weight, bias):
        return F.linear(x, weight, bias)
    x = x.to(torch.bfloat16)
    traced = torch.compiler.is_compiling() or transformed()
    y: Tensor = _widened(x, weight) if traced else _Widened.apply(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def _emulated(x: Tensor, *others: Tensor | None) -> bool:
    """Whether W x would be a bfloat16 product of more than one row that this CPU emulates."""
    return not BF16_UNITS and x.is_cpu and x.numel() > x.shape[-1] and _bfloat16(x, *others)


def _turns(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the weight's gradient will be a bfloat16 product of many rows in hardware."""
    return (
        BF16_UNITS
        and bias is None
        and torch.is_grad_enabled()
        and weight.requires_grad
        and ordinary(x)
        and ordinary(weight)
        and x.numel() >= MANY * max(x.shape[-1], 1)
        and _bfloat16(x, weight)
        and not torch.compiler.is_compiling()
        and not transformed()
    )


def _bfloat16(x: Tensor, *others: Tensor | None) -> bool:
    """Whether W x is a bfloat16 product, by autocast or by itself."""
    dtypes = {y.dtype for y in (x, *others) if y is not None}
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16 and dtypes <= CASTS
    return dtypes == {torch.bfloat16}


class _Turned(torch.autograd.Function):
    """y = W x of bfloat16 numbers, whose backward turns g before the product g^T x.

    The library would reorder a transposed operand inside the product, which then takes two to three times as long
    as the forward one; a copy made first costs 4 bytes a number. Keeps x and W.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            g = g.contiguous()
            gx = g @ weight if ctx.needs_input_grad[0] else None
            return gx, transposed(g.flatten(0, -2)) @ x.flatten(0, -2)


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
