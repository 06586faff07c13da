"""The feed-forward core.

swiglu:  y = W_down( silu(W_gate x) * W_up x )        (arXiv 2002.05202)
gelu:    y = W_down gelu(W_up x)                      (arXiv 1606.08415)
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence.mixer import Mixer, SequenceConfig
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "mlp")
class MLP(Mixer):
    """A two-layer feed-forward network on each token."""

    equation = "y = W_down (silu(W_gate x) * W_up x)"
    source = "arXiv 2002.05202"

    class Config(SequenceConfig):
        """hidden: inner width; None is 8d/3 rounded to a multiple of 8 for swiglu, 4d for gelu."""

        hidden: int | None = None
        act: Literal["swiglu", "gelu"] = "swiglu"

        def check(self) -> None:
            if self.hidden is not None and self.hidden < 1:
                raise InputError(
                    f"mlp(hidden={self.hidden}): allowed is 1 or more, or None for the usual width"
                )

        def hidden_width(self, layout: Layout) -> int:
            """The inner width in a model."""
            if self.hidden is not None:
                return self.hidden
            return 4 * layout.d_model if self.act == "gelu" else max(8, round(layout.d_model / 3) * 8)

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens", weights="fixed", sharing="per block", short_swa="no: each token alone"
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            matrices = 3 if self.act == "swiglu" else 2
            numbers = matrices * shape.layout.d_model * self.hidden_width(shape.layout)
            return Cost(
                parameters=numbers,
                flops_forward=2 * numbers * shape.tokens,
                flops_backward=4 * numbers * shape.tokens,
            )

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        hidden = cfg.hidden_width(layout)
        self.gated = cfg.act == "swiglu"
        self.up = nn.Linear(
            layout.d_model, 2 * hidden if self.gated else hidden, bias=False
        )  # gate rows first
        self.down = nn.Linear(hidden, layout.d_model, bias=False)

    def output_layers(self) -> list[nn.Linear]:
        return [self.down]

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        x = reads.x.to(self.up.weight.dtype)
        if self.gated:
            gate, up = self.up(x).chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(self.up(x))
        return F.dropout(self.down(inner), self.layout.dropout, self.training)
