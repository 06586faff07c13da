"""How a Deep Delta state is opened, read and closed: compressors, the embedding convolution, the stream.

TC  u[t, i] = sum_j p_j sum_s w[i, j, k-1-s] X[t-s, i, j]     over tokens, then a learned read vector p
CC  u[i]    = sum_v Weff[i, v] X[i, v]                        over the value channels, alone for each token
free  u[i]  = sum_v c[i, v] X[i, v]                           the paper's words for CC: d m numbers, no p
EC  X_0[t, i, j] = sum_s w[i, j, k-1-s] x[t-s, i]             from the embeddings to m channels

All start as in the public code (arXiv 2601.00417): kernels N(0, 0.25 / d), p = 1 / m, EC the identity.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth.connection import State, Stream
from twoaxis.ops import channel_read
from twoaxis.ops.native import delta_step
from twoaxis.ops.native.few_tokens import folds
from twoaxis.ops.precision import compute_dtype
from twoaxis.sequence.convolution import TokenMemory
from twoaxis.types import DTYPES, Context, Layout, TensorSpec


class ConvMemory(TokenMemory):
    """The memory of one convolution, at one place in the model: rows of `channels` in the residual state's dtype."""

    def __init__(self, channels: tuple[int, ...], kernel: int, state_dtype: str) -> None:
        super().__init__(math.prod(channels), kernel)
        self.channels, self.state_dtype = channels, state_dtype

    def row(self, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
        return self.channels, torch.float64 if dtype == torch.float64 else DTYPES[self.state_dtype]


class Compressor(nn.Module, ABC):
    """(B, T, d, m) -> (B, T, d)."""

    def folds(self) -> tuple[Tensor, Tensor | None] | None:
        """Kernel (d, k) and read vector (m,) where it sees each token alone; no vector where the kernel is (d, m)."""
        return None

    @abstractmethod
    def forward(self, X: Tensor, ctx: Context, memory: ConvMemory | None) -> Tensor:
        """u."""


class TokenCompressor(Compressor):
    """TC: (B, T, d, m) -> (B, T, d), causal over tokens; every place that calls it brings its own memory."""

    def __init__(self, width: int, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = _kernel(width, channels, kernel)
        self.read = nn.Parameter(torch.full((channels,), 1 / channels))

    def forward(self, X: Tensor, ctx: Context, memory: ConvMemory | None) -> Tensor:
        assert memory is not None
        mixed = memory(X.to(compute_dtype(X)), self.weight, ctx)
        return (mixed * self.read.to(mixed.dtype)).sum(-1).to(X.dtype)


class ChannelCompressor(Compressor):
    """CC: (B, T, d, m) -> (B, T, d), a cross-correlation along the m channels, zero padded to m, then p."""

    def __init__(self, width: int, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = _kernel(width, kernel)
        self.read = nn.Parameter(torch.full((channels,), 1 / channels))

    def folds(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.read

    def effective(self) -> Tensor:
        """Kernel and read vector folded, Weff[i, v] = sum_j p_j w[i, v - j + (k-1)//2], (d, m)."""
        m, left = self.read.shape[0], (self.weight.shape[1] - 1) // 2
        windows = F.pad(self.weight, (m - 1, m - 1)).unfold(1, m, 1)  # row a is w[:, a-m+1 .. a]
        return (windows[:, left : left + m].flip(1) * self.read[:, None]).sum(1)

    def forward(self, X: Tensor, ctx: Context, memory: ConvMemory | None) -> Tensor:
        if ctx.cache is None:
            return channel_read(X, self.effective())
        name = ("effective", id(self))  # a block's places share it, and in decoding fold it once
        return channel_read(X, ctx.cache.once(name, self.effective))


class FreeCompressor(Compressor):
    """The paper's CC: (B, T, d, m) -> (B, T, d) by a free number for each feature and channel."""

    def __init__(self, width: int, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = _kernel(width, channels)

    def folds(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, None

    def forward(self, X: Tensor, ctx: Context, memory: ConvMemory | None) -> Tensor:
        return channel_read(X, self.weight)


class EmbeddingConv(nn.Module):
    """EC: (B, T, d) -> (B, T, d, m) by a causal convolution over tokens; starts as m copies."""

    def __init__(self, width: int, channels: int, kernel: int, state_dtype: str) -> None:
        super().__init__()
        identity = torch.zeros(width, channels, kernel)
        identity[..., -1] = 1
        self.weight = nn.Parameter(identity)
        self.memory = ConvMemory((width, 1), kernel, state_dtype)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.memory(x.unsqueeze(-1), self.weight, ctx)


def _kernel(width: int, *rest: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(width, *rest) * (0.5 / math.sqrt(width)))


KINDS: dict[str, type[Compressor]] = {
    "token": TokenCompressor,
    "channel": ChannelCompressor,
    "free": FreeCompressor,
}


def new_compressor(cfg: Any, layout: Layout) -> Compressor | None:
    """The compressor that a DDL config asks for; None for a state without value channels."""
    if not cfg.expanded:
        return None
    return KINDS[cfg.compressor](layout.d_model, cfg.value_dim, cfg.taps)


def new_memory(cfg: Any, layout: Layout) -> ConvMemory | None:
    """What one place that calls a compressor has to remember; None unless it looks over tokens."""
    if not cfg.expanded or cfg.compressor != "token":
        return None
    return ConvMemory((layout.d_model, cfg.value_dim), cfg.taps, layout.state_dtype)


def step(
    cfg: Any,
    X: Tensor,
    compress: Compressor | None,
    norm: nn.Module,
    gate: nn.Linear,
    target: nn.Linear | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """c, v and beta of a sublayer in one call, in a step of decoding; None where it takes more."""
    kernels = (None, None) if compress is None else compress.folds()
    if kernels is None or target is None or not folds(norm):
        return None
    return delta_step.read(
        X, kernels[0], kernels[1], norm.weight, (gate.weight, gate.bias), (target.weight, target.bias), eps=norm.eps,
        scale=cfg.target_scale if cfg.target_act == "sigmoid" else 0.0, raw=cfg.target_source == "raw",
    )  # fmt: skip


class DDLStream(Stream):
    """Opens with m channels of the embeddings, closes with a compressor of its own and the final norm."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(layout)
        self.cfg = cfg
        d, m = layout.d_model, cfg.value_dim
        self.expand = EmbeddingConv(d, m, cfg.embed_kernel, layout.state_dtype) if cfg.embeds else None
        self.compress = new_compressor(cfg, layout)
        self.memory = new_memory(cfg, layout)

    def open(self, x: Tensor, ctx: Context) -> State:
        if self.expand is not None:
            return self.expand(x, ctx)
        return x.unsqueeze(-1).repeat(1, 1, 1, self.cfg.value_dim) if self.cfg.expanded else x

    def readout(self, state: State, ctx: Context) -> Tensor:
        """The state read as (B, T, d), before the final norm."""
        return state if self.compress is None else self.compress(state, ctx, self.memory)

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(self.readout(state, ctx))

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        channels = (self.cfg.value_dim,) if self.cfg.expanded else ()
        return {"stream": self.spec_of(batch_size, seq_len, *channels)}
