"""ShortSWA: attention over a short sliding window, a local mixer in the slot of ShortConv and Canon layers.

    y_t = W_o concat_h softmax_{s in window(t)}( q_t . k_s / sqrt(D) ) v_s        (arXiv 2603.16039, section 2.4)

    sliding     s = t-w+1 .. t                          the paper's definition
    chunk       s = floor(t/w) w .. t                   nothing crosses a chunk of w tokens
    two_chunk   s = max(0, floor(t/w) - 1) w .. t       the chunk and the whole one before, up to 2w tokens

t is the token's position in its document. The paper leaves heads, position encoding, projections and init open;
here they are options. The local-to-global block (Algorithm 1) is ["short_swa(window=64)", "attention", "mlp"].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.ops import check_window, visible_pairs
from twoaxis.sequence.attention import SoftmaxAttention
from twoaxis.sequence.attention_config import AttentionConfig
from twoaxis.sink_slot import SinkSlot
from twoaxis.slot import Slot
from twoaxis.tape import Tape
from twoaxis.types import Context, Coordinates, Layout, Shape


class ShortSWAConfig(AttentionConfig):
    """window: w, the current position included. field: which positions that is, see above.

    position: "rope", "bias" (a learned number for each head and distance) or "none". sink: a learned logit per
    head in the denominator, with no value. sink_tokens: the first so many tokens of a document stay visible.
    value: W_v of its own, "key" (W_v = W_k) or "identity". output: W_o or "identity". start: "zero" sets W_o
    to 0, so that the block starts as if the sublayer were not there.
    """

    window: int = 64
    field: Literal["sliding", "chunk", "two_chunk"] = "sliding"
    position: Literal["rope", "bias", "none"] = "rope"
    sink: bool = False
    sink_tokens: int = 0
    value: Literal["linear", "key", "identity"] = "linear"
    output: Literal["linear", "identity"] = "linear"
    start: Literal["normal", "zero"] = "normal"

    def check(self) -> None:
        super().check()
        check_window(self.window)
        if self.sink_tokens < 0:
            raise InputError(f"short_swa(sink_tokens={self.sink_tokens}): allowed is 0 or more")
        if self.rope_dims is not None and self.position != "rope":
            raise InputError(
                f"short_swa(rope_dims={self.rope_dims}, position={self.position!r}): rope_dims needs position='rope'"
            )
        if self.start == "zero" and self.output == "identity":
            raise InputError("short_swa(start='zero', output='identity'): there is no W_o to start at zero")

    @property
    def rotates(self) -> bool:
        return self.position == "rope" and super().rotates

    @property
    def values_as_given(self) -> bool:
        return super().values_as_given and not self.sink_tokens

    def heads(self, layout: Layout) -> tuple[int, int, int]:
        own = self.value == "identity"  # then each query head has the values of its own d / H features
        plan = replace(layout, n_kv_heads=self.n_heads or layout.n_heads) if own else layout
        h, hkv, width = super().heads(plan)
        d = layout.d_model
        if own and (h != hkv or d % h):
            raise InputError(
                f"short_swa(value='identity'): d_model={d}, n_heads={h}, n_kv_heads={hkv}: heads must divide d_model, "
                "and there are as many of keys and values"
            )
        if self.output == "identity" and not own and h * width != d:
            raise InputError(
                f"short_swa(output='identity'): {h} heads of width {width} make {h * width} features, not d_model={d}"
            )
        return h, hkv, width

    def value_width(self, layout: Layout) -> int:
        h, _, width = self.heads(layout)
        return layout.d_model // h if self.value == "identity" else width

    def window_in(self, block: int) -> int | None:
        return self.window * (2 if self.field == "two_chunk" else 1)

    def pairs(self, seq_len: int, block: int) -> int:
        if self.field == "sliding":
            return visible_pairs(seq_len, self.window + self.sink_tokens)
        whole = self.sink_tokens + (self.window if self.field == "two_chunk" else 0)
        return sum(min(t + 1, t % self.window + 1 + whole) for t in range(seq_len))

    def halo_in(self, block: int = 0) -> int | None:
        return None if self.sink_tokens else super().halo_in(block)

    def extras(self, t: Tape, layout: Layout) -> dict[str, Any]:
        plain = not self.sink and self.position != "bias" and self.field == "sliding"
        return {
            "plain": plain,
            "biased": self.position == "bias",
            "sink_tokens": self.sink_tokens,
            "reach": self.field != "sliding",
        }

    def extra_parameters(self, layout: Layout) -> int:
        h, _, _ = self.heads(layout)
        biases = h * (self.window_in(0) or 0) if self.position == "bias" else 0
        return super().extra_parameters(layout) + biases + (h if self.sink else 0)

    def state_bytes(self, shape: Shape, block: int) -> int:
        ring = super().state_bytes(shape, block)
        if not self.sink_tokens:
            return ring
        rows = shape.cache_rows((self.window_in(block) or 0) - 1) * shape.batch_size
        pinned = (self.sink_tokens + shape.max_rollback) * shape.batch_size
        numbers = 2 * torch.int64.itemsize  # each row's document and rank
        return (ring // rows + numbers) * (rows + pinned)

    def coordinates(self) -> Coordinates:
        exact = {"sliding": "yes", "chunk": "extended: cut at chunks", "two_chunk": "extended: whole chunks"}
        return Coordinates(
            source="tokens",
            weights="QK",
            normalizer="softmax",
            sharing="per block",
            short_swa=exact[self.field],
        )


@spec.register("sequence", "short_swa")
class ShortSWA(SoftmaxAttention):
    """Sliding-window attention as a sublayer of its own, or on a branch of another mixer."""

    equation = "y_t = W_o softmax(q_t k_s / sqrt(D)) v_s over s in (t-w, t]"
    source = "arXiv 2603.16039"

    class Config(ShortSWAConfig):
        """The options of `ShortSWAConfig`."""

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        biased, sinks = cfg.position == "bias" and self.token_read, cfg.sink and self.token_read
        bias = torch.zeros(self.n_heads, self.window) if biased else None
        self.position_bias = None if bias is None else nn.Parameter(bias)
        self.sink_logits = nn.Parameter(torch.zeros(self.n_heads)) if sinks else None
        if cfg.start == "zero":
            self.output_scale = 0.0

    def read(self, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        wide = max(self.width, self.value_width)  # the operator takes keys and values of one width
        q, k, v = (pad(x, (0, wide - x.shape[-1])) if x.shape[-1] < wide else x for x in (q, k, v))
        y = super().read(q, k, v, segments, positions)
        return y if wide == self.value_width else y[..., : self.value_width]

    def extras(self, positions: Tensor) -> dict[str, Any]:
        return {
            "scale": self.width**-0.5,
            "sink_logits": self.sink_logits,
            "sink_tokens": self.cfg.sink_tokens,
            "position_bias": self.position_bias,
            "reach": self._reach(positions),
        }

    def _reach(self, positions: Tensor) -> Tensor | None:
        """How many positions each token sees in its chunks; None where the window says it all."""
        if self.cfg.field == "sliding":
            return None
        w = self.cfg.window
        return positions % w + (1 if self.cfg.field == "chunk" else w + 1)

    def remember(self, k: Tensor, v: Tensor, ctx: Context) -> tuple[Tensor, Tensor, Tensor | None]:
        if ctx.cache is None or not self.cfg.sink_tokens:
            return super().remember(k, v, ctx)
        slot = ctx.cache[self.slot_name]
        assert isinstance(slot, SinkSlot)
        rows = slot.append(k=k, v=v, segment=ctx.segments)
        return rows["k"], rows["v"], rows["segment"]

    def new_slot(
        self,
        batch_size: int,
        max_length: int | None,
        max_rollback: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slot:
        if not self.cfg.sink_tokens:
            return super().new_slot(batch_size, max_length, max_rollback, dtype, device)
        return SinkSlot(
            batch_size,
            self.rows(dtype),
            sinks=self.cfg.sink_tokens,
            keep=self.window - 1,
            max_rollback=max_rollback,
            device=device,
        )
