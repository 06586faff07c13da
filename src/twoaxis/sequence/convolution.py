"""A causal depthwise convolution with its weights and its memory: what ShortConv, Canon and token shift share.

conv(u)_t = b + sum_{j=0..K-1} w_j * u_{t-j}        per channel, within a document; the last stored tap is w_0
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoaxis.cache import Remembers, Slot
from twoaxis.errors import InputError
from twoaxis.ops import depthwise_causal_conv
from twoaxis.ops.traced_tokens import causal_conv
from twoaxis.tape import Array, Tape
from twoaxis.types import DTYPES, Context, Cost, Shape


class TokenMemory(nn.Module, Remembers):
    """The last K - 1 inputs (B, T, c) of a causal convolution. It learns nothing."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.width, self.kernel = width, kernel

    def forward(self, u: Tensor, weight: Tensor, ctx: Context) -> Tensor:
        """u (B, T, c) convolved with weight (.., K) within documents, after the kept rows; 0 on padding."""
        if ctx.cache is None:
            return depthwise_causal_conv(u, weight, segments=ctx.segments)
        rows = ctx.cache[self.slot_name].append(u=u)["u"]
        seen, count = ctx.cache.segments, rows.shape[1]
        segments = None if seen is None else seen[:, seen.shape[1] - count :]
        return depthwise_causal_conv(u, weight, history=rows[:, : count - u.shape[1]], segments=segments)

    def new_slot(
        self,
        batch_size: int,
        max_length: int | None,
        max_rollback: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slot:
        return Slot(
            batch_size,
            {"u": self.row(dtype)},
            keep=self.kernel - 1,
            max_rollback=max_rollback,
            device=device,
        )

    def row(self, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a kept row, in a cache of `dtype`."""
        return (self.width,), dtype


class Convolution(nn.Module):
    """(B, T, c) -> (B, T, c). weight (c, K) and bias (c,) start as U(-1/sqrt(K), 1/sqrt(K)), as torch's Conv1d."""

    def __init__(self, width: int, kernel: int, bias: bool = False) -> None:
        super().__init__()
        bound = kernel**-0.5  # a channel has K inputs
        self.weight = nn.Parameter(torch.empty(width, kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(width).uniform_(-bound, bound)) if bias else None
        self.memory = TokenMemory(width, kernel)

    def forward(self, u: Tensor, ctx: Context) -> Tensor:
        y = self.memory(u, self.weight, ctx)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def convolve(t: Tape, u: Array, kernel: int, bias: bool = False) -> Array:
    """A `Convolution` in sizes alone."""
    y = causal_conv(t, u, t.weight(u.width * kernel), kernel)
    return t.add(y, t.weight(u.width)) if bias else y


def without_padding(y: Tensor, ctx: Context) -> Tensor:
    """y (B, T, c), zero on padding: nothing of it may reach a later token."""
    return y if ctx.segments is None else y.masked_fill((ctx.segments < 0)[..., None], 0.0)


def check_kernel(name: str, kernel: int) -> None:
    """Refuse a convolution without taps."""
    if kernel < 1:
        raise InputError(f"{name}(kernel={kernel}): allowed is 1 or more taps, the current token's included")


def conv_cost(shape: Shape, width: int, kernel: int, bias: bool = False) -> Cost:
    """Counts of a convolution: 2 K per channel and token, and K rows of memory."""
    flops = 2 * width * kernel * shape.tokens
    rows = shape.cache_rows(kernel - 1) * shape.batch_size
    return Cost(
        parameters=width * (kernel + bias),
        flops_forward=flops,
        flops_backward=2 * flops,
        decode_state_bytes=rows * width * DTYPES[shape.dtype].itemsize,
    )
