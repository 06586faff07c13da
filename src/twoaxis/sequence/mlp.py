"""The feed-forward core.

swiglu:  y = W_down( silu(W_gate x) * W_up x )        (arXiv 2002.05202)
gelu:    y = W_down gelu(W_up x)                      (arXiv 1606.08415)
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.linear import Linear, fitting
from twoaxis.ops import swiglu, traced
from twoaxis.sequence.mixer import Between, Mixer, Place, halo_sum
from twoaxis.sequence.nested import HostConfig, build_inner, place, run_inner
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "mlp")
class MLP(Mixer):
    """A two-layer feed-forward network on each token."""

    equation = "y = W_down (silu(W_gate x) * W_up x)"
    source = "arXiv 2002.05202"

    class Config(HostConfig):
        """hidden: inner width; None is 8d/3 rounded to a multiple of 8 for swiglu, 4d for gelu. input: a mixer before
        W_gate and W_up. hidden_input: a mixer on what they make, side by side, before the activation."""

        hidden: int | None = None
        act: Literal["swiglu", "gelu"] = "swiglu"
        input: str | None = None
        hidden_input: str | None = None

        nested: ClassVar[tuple[str, ...]] = ("input", "hidden_input")

        @property
        def products_first(self) -> bool:
            return self.input is None

        def check(self) -> None:
            super().check()
            if self.hidden is not None and self.hidden < 1:
                raise InputError(
                    f"mlp(hidden={self.hidden}): allowed is 1 or more, or None for the usual width"
                )

        def hidden_width(self, layout: Layout, scale: float = 1.0) -> int:
            """The inner width in a model; scaled widths are again multiples of 8 where the width is one."""
            usual = 4 * layout.d_model if self.act == "gelu" else max(8, round(layout.d_model / 3) * 8)
            width = usual if self.hidden is None else self.hidden
            step = 1 if width % 8 else 8
            return width if scale == 1.0 else max(1, round(width * scale / step)) * step

        def places(self, layout: Layout, options: dict[str, Any]) -> dict[str, Layout]:
            made = self.hidden_width(layout, options.get("hidden_scale", 1.0)) * (
                1 if self.act == "gelu" else 2
            )
            heads, kv = layout.n_heads, layout.n_kv_heads
            return {
                "input": place(layout, layout.d_model, heads, kv),
                "hidden_input": place(layout, made, heads, kv),
            }

        def halo_in(self, block: int = 0) -> int | None:
            return halo_sum(*(self.inner_halo(name, block) for name in self.nested))

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens", weights="fixed", sharing="per block", short_swa="no: each token alone"
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return self.cost_as_built(shape, block, {})

        def cost_as_built(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
            matrices = 3 if self.act == "swiglu" else 2
            hidden = self.hidden_width(shape.layout, options.get("hidden_scale", 1.0))
            numbers = matrices * shape.layout.d_model * hidden
            own = Cost(
                parameters=numbers,
                flops_forward=2 * numbers * shape.tokens,
                flops_backward=4 * numbers * shape.tokens,
            )
            return own + self.inner_cost(shape, block, options)

        def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
            hidden = self.hidden_width(at.layout, at.options.get("hidden_scale", 1.0))
            x = self.inner_trace("input", t, reads.x, at)
            made = t.linear(x, hidden * (2 if self.act == "swiglu" else 1))
            inner = self.inner_trace("hidden_input", t, made, at)
            inner = traced.swiglu(t, inner, hidden) if self.act == "swiglu" else t.map("gelu", inner)
            return t.dropout(t.linear(inner, at.layout.d_model), at.layout.dropout)

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        hidden = cfg.hidden_width(layout, self.hidden_scale)
        self.gated = cfg.act == "swiglu"
        self.up = Linear(layout.d_model, 2 * hidden if self.gated else hidden)  # gate rows first
        self.down = Linear(hidden, layout.d_model)
        self.mixers = build_inner(cfg, layout, block, options)

    def output_layers(self) -> list[nn.Linear]:
        return [self.down]

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        x = reads.x.to(fitting(reads.x, self.up.weight))
        x = run_inner(self.mixers, "input", x, ctx)
        inner = run_inner(self.mixers, "hidden_input", self.up(x), ctx)
        inner = swiglu(inner) if self.gated else F.gelu(inner)
        y = self.down(inner)
        return F.dropout(y, self.layout.dropout) if self.training else y
