"""Softmax attention over tokens: full or windowed, grouped-query, rotary.

    q, k, v = W_q x_q, W_k x_k, W_v x_v          heads of width D = d / H (arXiv 1706.03762, GQA 2305.13245)
    y = W_o softmax(q k^T / sqrt(D)) v           over the last `window` positions, the current one included

`project` and `attend` are the two halves; methods that reach inside attention put their work between them.
`attend` is `gather`, all before W_o, and `finish`.
"""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.cache import Remembers, Slot
from twoaxis.errors import InputError
from twoaxis.linear import Linear, fitting, linear
from twoaxis.norm import RMSNorm
from twoaxis.ops import check_window, local_attention, rotate
from twoaxis.sequence.attention_config import AttentionConfig
from twoaxis.sequence.mixer import Mixer
from twoaxis.sequence.nested import build_inner, run_inner
from twoaxis.sequence.rotary import rotary_angles
from twoaxis.types import Context, Coordinates, Layout, Reads


class SoftmaxAttention(Mixer, Remembers, ABC):
    """What full and short attention have in common."""

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        self.n_heads, self.n_kv_heads, self.width = cfg.heads(layout)
        self.value_width, self.rotated = cfg.value_width(layout), cfg.rotated(layout)
        self.window, self.remembers = cfg.window_in(block), self.token_read
        d = layout.d_model
        self.sizes = [self.n_heads * self.width, self.n_kv_heads * self.width]  # rows of W_q, W_k, W_v
        if cfg.value == "linear" and self.value_projection:
            self.sizes.append(self.n_kv_heads * self.width)
        if self.token_read:
            self.qkv = Linear(d, sum(self.sizes))
        linear = cfg.output == "linear"
        self.out = Linear(self.n_heads * self.value_width, d) if linear else nn.Identity()
        if self.token_read:
            self._build_inside(cfg, layout, options)

    def _build_inside(self, cfg: Any, layout: Layout, options: dict[str, Any]) -> None:
        """What stands between the projections."""
        self.norm = cfg.norm(layout)
        q, k = (self.width, self.width) if self.norm == "head" else self.sizes[:2]
        self.q_norm = nn.Identity() if self.norm == "none" else RMSNorm(q, layout.norm_eps)
        self.k_norm = nn.Identity() if self.norm == "none" else RMSNorm(k, layout.norm_eps)
        self.mixers = build_inner(cfg, layout, self.block, options)

    def output_layers(self) -> list[nn.Linear]:
        return [self.out] if isinstance(self.out, nn.Linear) else []

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        if not self.token_read:
            raise InputError(
                "this attention has W_o alone: its depth method must give `finish` what it projects"
            )
        q, k, v = self.project(reads, ctx)
        if v is None:
            raise InputError("this attention has no W_v: its depth method must put values between its halves")
        return self.attend(q, k, v, ctx)

    def project(self, reads: Reads, ctx: Context | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """q (B, T, H, D), k and v (B, T, Hkv, D), before the mixers q, k, v, qkv and before rotation.

        v is None without `value_projection`. ctx: needed by a mixer before the projections, and only there.
        """
        reads = reads.to(fitting(reads.x, self.qkv.weight))
        if "input" in self.mixers:
            if ctx is None or reads.key is not None or reads.value is not None:
                raise InputError(
                    f"{self.cfg.spec()} mixes its input: give project() the context and one input"
                )
            reads = Reads(run_inner(self.mixers, "input", reads.x, ctx))
        if reads.key is None and reads.value is None:
            parts = self.qkv(reads.x).split_with_sizes(self.sizes, -1)
        else:
            inputs = (
                reads.x,
                reads.x if reads.key is None else reads.key,
                reads.x if reads.value is None else reads.value,
            )
            weights = self.qkv.weight.split(self.sizes)
            parts = [linear(x, w) for x, w in zip(inputs, weights)]  # two weights: no values
        q, k, *v = parts
        values = v[0] if v else self._values(k, reads)
        if self.norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (x.unflatten(-1, (-1, self.width)) for x in (q, k))
        if self.norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, None if values is None else values.unflatten(-1, (-1, self.value_width))

    def _values(self, k: Tensor, reads: Reads) -> Tensor | None:
        """Values without a W_v."""
        if not self.value_projection:
            return None
        if self.cfg.value == "key":  # W_v = W_k, on the values' own input if they have one
            return k if reads.value is None else linear(reads.value, self.qkv.weight.split(self.sizes)[1])
        return (reads.x if reads.value is None else reads.value).to(k.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """y (B, T, d) from q, k, v as `project` gives them; the cache keeps the rotated keys and the values."""
        return self.finish(self.gather(q, k, v, ctx))

    def gather(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """What W_o projects, the heads side by side, (B, T, H * width of values)."""
        if self.mixers:
            q, k, v = self._mixed(q, k, v, ctx)
        positions, turn = self.positions(q, ctx), lambda: self.angles(positions, q.dtype)
        if self.rotated:
            key = ("angles", self.rotated, self.layout.rope_base, q.dtype)
            cos, sin = turn() if ctx.cache is None else ctx.cache.once(key, turn)
            if ctx.cache is None:
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            else:  # a step is made of calls more than of work: one for both
                sizes = (q.shape[2], k.shape[2])
                q, k = rotate(torch.cat((q, k), 2), cos, sin).split_with_sizes(sizes, 2)
        k, v, segments = self.remember(k, v, ctx)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
        return self.read(q, k, v, segments, positions).transpose(1, 2).flatten(2)

    def finish(self, heads: Tensor) -> Tensor:
        """y (B, T, d): W_o, and dropout in training."""
        y: Tensor = self.out(heads)
        return F.dropout(y, self.layout.dropout) if self.training else y

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v after the mixers on each of them, then after the one on all side by side."""
        q, k, v = (
            run_inner(self.mixers, name, x.flatten(2), ctx).view_as(x)
            for name, x in (("q", q), ("k", k), ("v", v))
        )
        if "qkv" in self.mixers:
            flat = [x.flatten(2) for x in (q, k, v)]
            mixed = run_inner(self.mixers, "qkv", torch.cat(flat, -1), ctx).split(
                [x.shape[-1] for x in flat], -1
            )
            q, k, v = (y.unflatten(-1, x.shape[2:]) for x, y in zip((q, k, v), mixed))
        return q, k, v

    def positions(self, q: Tensor, ctx: Context) -> Tensor:
        """The position of each new token, (T,) or (B, T)."""
        if ctx.positions is not None:
            return ctx.positions
        if ctx.cache is None:
            return torch.arange(q.shape[1], device=q.device)
        start = ctx.cache.length
        made = ctx.cache.once("positions", lambda: torch.arange(start, start + q.shape[1], device=q.device))
        positions: Tensor = made
        return positions

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotation of tokens at these positions."""
        return rotary_angles(positions, self.rotated, self.layout.rope_base, dtype)

    def remember(self, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        """The kept keys and values followed by the new ones, and the documents of all these rows."""
        if ctx.cache is None:
            return k, v, ctx.segments
        rows = ctx.cache[self.slot_name].append(**({"k": k, "v": v} if self.value_cache else {"k": k}))
        seen, count = ctx.cache.segments, rows["k"].shape[1]
        values = rows["v"] if self.value_cache else v[:, v.shape[1] - count :]  # as far back as keys go
        return rows["k"], values, None if seen is None else seen[:, seen.shape[1] - count :]

    def read(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        """softmax(q k^T / sqrt(D)) v, heads before tokens."""
        return local_attention(q, k, v, self.window, segments=segments, **self.extras(positions))

    def extras(self, positions: Tensor) -> dict[str, Any]:
        """Further arguments of the operator: sinks, position bias, chunks."""
        return {}

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
            self.rows(dtype),
            keep=None if self.window is None else self.window - 1,
            max_rollback=max_rollback,
            max_length=max_length,
            device=device,
        )

    def rows(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What the cache keeps of each token."""
        widths = {"k": self.width, "v": self.value_width} if self.value_cache else {"k": self.width}
        return {name: ((self.n_kv_heads, width), dtype) for name, width in widths.items()}


@spec.register("sequence", "attention")
class Attention(SoftmaxAttention):
    """Causal softmax attention, full by default; `pattern="SSSL"` with `window` alternates short and full by block."""

    equation = "y = W_o softmax(q k^T / sqrt(D)) v"
    source = "arXiv 1706.03762"

    class Config(AttentionConfig):
        """window: positions seen, the current one included (None: all). pattern: S or L for each block, repeated."""

        window: int | None = None
        pattern: str | None = None

        def check(self) -> None:
            super().check()
            check_window(self.window)
            if self.pattern is not None and (
                not self.pattern or set(self.pattern) - {"S", "L"} or self.window is None
            ):
                raise InputError(
                    f"attention(pattern={self.pattern!r}, window={self.window!r}): allowed is a word of S (short) and "
                    "L (full) such as 'SSSL', together with a window"
                )

        def window_in(self, block: int) -> int | None:
            if self.pattern and self.pattern[block % len(self.pattern)] == "L":
                return None
            return self.window

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens",
                weights="QK",
                normalizer="softmax",
                sharing="per block",
                short_swa="yes: window = w, or T",
            )
