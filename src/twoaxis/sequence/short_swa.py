"""ShortSWA: attention over a short sliding window, a local mixer in the slot of ShortConv and Canon layers.

    y_t = W_o concat_h softmax_{s = max(0, t-w+1) .. t}( q_t . k_s / sqrt(D) ) v_s        (arXiv 2603.16039, section 2.4)

The paper leaves heads, position encoding, projections and init open; here they are options. The paper's
local-to-global block (Algorithm 1) is ["short_swa(window=64)", "attention", "mlp"].
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.ops import check_window
from twoaxis.sequence.attention import AttentionConfig, SoftmaxAttention
from twoaxis.types import Coordinates, Layout


@spec.register("sequence", "short_swa")
class ShortSWA(SoftmaxAttention):
    """Sliding-window attention as a sublayer of its own."""

    equation = "y_t = W_o softmax(q_t k_s / sqrt(D)) v_s over s in (t-w, t]"
    source = "arXiv 2603.16039"

    class Config(AttentionConfig):
        """window: positions seen, the current one included. position: "rope", "bias" (a learned number for each head
        and distance) or "none". sink: a learned logit per head in the denominator, with no value. start: "zero" sets
        W_o to 0, so that the block starts as if the sublayer were not there."""

        window: int = 64
        position: Literal["rope", "bias", "none"] = "rope"
        sink: bool = False
        start: Literal["normal", "zero"] = "normal"

        def check(self) -> None:
            super().check()
            if self.window is None:
                raise InputError(
                    "short_swa(window=None): allowed is 1 or more; use 'attention' to see everything"
                )
            check_window(self.window)

        @property
        def rotary(self) -> bool:
            return self.position == "rope"

        def window_in(self, block: int) -> int | None:
            return self.window

        def parameters(self, layout: Layout) -> int:
            h, _, _ = self.heads(layout)
            extra = h * (self.window if self.position == "bias" else 0) + (h if self.sink else 0)
            return super().parameters(layout) + extra

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens", weights="QK", normalizer="softmax", sharing="per block", short_swa="yes"
            )

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        self.position_bias = (
            nn.Parameter(torch.zeros(self.n_heads, cfg.window)) if cfg.position == "bias" else None
        )
        self.sink_logits = nn.Parameter(torch.zeros(self.n_heads)) if cfg.sink else None
        if cfg.start == "zero":
            self.output_scale = 0.0

    def extras(self) -> dict[str, Any]:
        return {"position_bias": self.position_bias, "sink_logits": self.sink_logits}
