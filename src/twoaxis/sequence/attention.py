"""Softmax attention over tokens: full or windowed, grouped-query, rotary.

    q, k, v = W_q x_q, W_k x_k, W_v x_v          heads of width D = d / H (arXiv 1706.03762, GQA 2305.13245)
    y = W_o softmax(q k^T / sqrt(D)) v           over the last `window` positions, the current one included

`project` and `attend` are the two halves; methods that reach inside attention put their work between them.
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
from twoaxis.norm import RMSNorm
from twoaxis.ops import check_window, local_attention, visible_pairs
from twoaxis.sequence.mixer import Mixer, SequenceConfig
from twoaxis.sequence.rotary import rotary_angles, rotate
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


class AttentionConfig(SequenceConfig):
    """Options that every softmax attention shares. None takes the model's value."""

    n_heads: int | None = None
    n_kv_heads: int | None = None
    qk_norm: bool | None = None

    @property
    def accepts_qkv(self) -> bool:
        return True

    def check(self) -> None:
        for name in ("n_heads", "n_kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(
                    f"{self.name}({name}={value}): allowed is 1 or more, or None for the model's"
                )

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are turned by their positions."""
        return True

    def heads(self, layout: Layout) -> tuple[int, int, int]:
        """(query heads H, key/value heads, head width D) in a model."""
        h = self.n_heads or layout.n_heads
        hkv = self.n_kv_heads or (layout.n_kv_heads if self.n_heads is None else h)
        if layout.d_model % h or h % hkv:
            raise InputError(
                f"{self.name}: d_model={layout.d_model}, n_heads={h}, n_kv_heads={hkv}: heads must divide d_model and "
                "key/value heads must divide heads"
            )
        if self.rotary and layout.d_model // h % 2:
            raise InputError(
                f"{self.name}: d_model={layout.d_model}, n_heads={h} give heads of width {layout.d_model // h}, "
                "and rotation needs an even width; change one"
            )
        return h, hkv, layout.d_model // h

    def window_in(self, block: int) -> int | None:
        """The window of this core in a block; None sees everything before."""
        raise NotImplementedError

    def parameters(self, layout: Layout) -> int:
        """How many numbers it learns."""
        h, hkv, width = self.heads(layout)
        normed = layout.qk_norm if self.qk_norm is None else self.qk_norm
        return 2 * layout.d_model * width * (h + hkv) + (2 * width if normed else 0)

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        return self.cost_as_built(shape, block, {})

    def cost_as_built(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
        layout, window = shape.layout, self.window_in(block)
        h, hkv, width = self.heads(layout)
        missing = 0 if options.get("value_projection", True) else layout.d_model * hkv * width
        projections = (4 * layout.d_model * width * (h + hkv) - 2 * missing) * shape.tokens
        scores = 4 * width * h * visible_pairs(shape.seq_len, window) * shape.batch_size
        rows = shape.seq_len if window is None else window
        item = torch.empty((), dtype=getattr(torch, shape.dtype)).element_size()
        return Cost(
            parameters=self.parameters(layout) - missing,
            flops_forward=projections + scores,
            flops_backward=2 * (projections + scores),
            decode_state_bytes=2 * hkv * width * rows * shape.batch_size * item,
        )


class SoftmaxAttention(Mixer, Remembers, ABC):
    """What full and short attention have in common."""

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        self.n_heads, self.n_kv_heads, self.width = cfg.heads(layout)
        self.window = cfg.window_in(block)
        d = layout.d_model
        self.sizes = [self.n_heads * self.width, self.n_kv_heads * self.width]  # rows of W_q, W_k, W_v
        if self.value_projection:
            self.sizes.append(self.n_kv_heads * self.width)
        self.qkv = nn.Linear(d, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.n_heads * self.width, d, bias=False)
        normed = layout.qk_norm if cfg.qk_norm is None else cfg.qk_norm
        self.q_norm = RMSNorm(self.width, layout.norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(self.width, layout.norm_eps) if normed else nn.Identity()

    def output_layers(self) -> list[nn.Linear]:
        return [self.out]

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        q, k, v = self.project(reads)
        if v is None:
            raise InputError("this attention has no W_v: its depth method must put values between its halves")
        return self.attend(q, k, v, ctx)

    def project(self, reads: Reads) -> tuple[Tensor, Tensor, Tensor | None]:
        """q (B, T, H, D), k and v (B, T, Hkv, D), before rotation; v is None without `value_projection`."""
        reads = reads.to(self.qkv.weight.dtype)
        if reads.key is None and reads.value is None:
            parts = self.qkv(reads.x).split(self.sizes, -1)
        else:
            inputs = (
                reads.x,
                reads.x if reads.key is None else reads.key,
                reads.x if reads.value is None else reads.value,
            )
            weights = self.qkv.weight.split(self.sizes)
            parts = [F.linear(x, w) for x, w in zip(inputs, weights)]  # two weights: no values
        q, k, *v = (p.unflatten(-1, (-1, self.width)) for p in parts)
        return self.q_norm(q), self.k_norm(k), v[0] if v else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """y (B, T, d) from q, k, v as `project` gives them; the cache keeps the rotated keys and the values."""
        if self.cfg.rotary:
            cos, sin = self.angles(q, ctx)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        segments = ctx.segments
        if ctx.cache is not None:
            rows = ctx.cache[self.slot_name].append(k=k, v=v)
            k, v = rows["k"], rows["v"]
            segments = ctx.cache.segments[:, -k.shape[1] :] if ctx.cache.segments is not None else None
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, heads, T, D)
        y = local_attention(q, k, v, self.window, segments=segments, **self.extras())
        y = self.out(y.transpose(1, 2).flatten(2))
        return F.dropout(y, self.layout.dropout, self.training)

    def angles(self, q: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotation of each token."""
        positions = ctx.positions
        if positions is None:
            start = ctx.cache.length if ctx.cache is not None else 0
            positions = torch.arange(start, start + q.shape[1], device=q.device)
        return rotary_angles(positions, self.width, self.layout.rope_base, q.dtype)

    def extras(self) -> dict[str, Any]:
        """Further arguments of the operator: sinks, position bias."""
        return {}

    def new_slot(
        self,
        batch_size: int,
        max_length: int | None,
        max_rollback: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slot:
        row = ((self.n_kv_heads, self.width), dtype)
        keep = None if self.window is None else self.window - 1
        return Slot(
            batch_size,
            {"k": row, "v": row},
            keep=keep,
            max_rollback=max_rollback,
            max_length=max_length,
            device=device,
        )


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
