"""ShortConv: a causal depthwise convolution of a few taps.

    depthwise   y_t = act( b + sum_{j<K} w_j * u_{t-j} )              on a branch of another mixer, or as a sublayer
    lfm2        y = W_out( g2 * conv(g1 * u) ),  g1, g2, u = W_in x   a whole sublayer (LFM2, transformers)

With SiLU, no bias and K = 4 on q, k and v it is the convolution of DeltaNet and its relatives (fla-org).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.linear import linear
from twoaxis.sequence.convolution import Convolution, check_kernel, conv_cost, convolve, without_padding
from twoaxis.sequence.mixer import Between, Mixer, Place, SequenceConfig
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "short_conv")
class ShortConv(Mixer):
    """A causal depthwise convolution, alone or between two gates."""

    equation = "y_t = act(b + sum_j w_j * u_{t-j})"
    source = "arXiv 2312.00752, 2406.06484"

    class Config(SequenceConfig):
        """kernel: taps, the current token's included. bias: of the convolution, and in "lfm2" of both projections.
        start: "identity" sets the current token's tap to 1 and all else of the convolution to 0."""

        form: Literal["depthwise", "lfm2"] = "depthwise"
        kernel: int = 4
        activation: Literal["none", "silu"] = "none"
        bias: bool = False
        start: Literal["normal", "identity"] = "normal"

        def check(self) -> None:
            check_kernel(self.name, self.kernel)

        def halo_in(self, block: int = 0) -> int | None:
            return self.kernel - 1

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens",
                weights="gated" if self.form == "lfm2" else "static",
                sharing="per block and channel",
                short_swa="no: weights by distance, not by content",
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            d = shape.layout.d_model
            total = conv_cost(shape, d, self.kernel, self.bias)
            if self.form == "depthwise":
                return total
            numbers = 4 * d * d
            flops = 2 * numbers * shape.tokens
            return total + Cost(
                parameters=numbers + 4 * d * self.bias, flops_forward=flops, flops_backward=2 * flops
            )

        def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
            u, d = reads.x, at.layout.d_model
            if self.form == "depthwise":
                return t.dropout(self._convolved(t, u), at.layout.dropout)
            made = t.linear(u, 3 * d, self.bias)
            gated = t.times(made.view(d), made.view(d))
            y = t.times(made.view(d), self._convolved(t, gated))
            return t.dropout(t.linear(y, d, self.bias), at.layout.dropout)

        def _convolved(self, t: Tape, u: Array) -> Array:
            y = convolve(t, u, self.kernel, self.bias)
            return t.map("silu", y) if self.activation == "silu" else y

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        d = layout.d_model
        self.conv = Convolution(d, cfg.kernel, cfg.bias)
        if cfg.start == "identity":
            with torch.no_grad():
                self.conv.weight.zero_()[:, -1] = 1
                if self.conv.bias is not None:
                    self.conv.bias.zero_()
        gated = cfg.form == "lfm2"
        self.into = nn.Linear(d, 3 * d, bias=cfg.bias) if gated else None  # rows of g1, g2, u
        self.out = nn.Linear(d, d, bias=cfg.bias) if gated else None

    def output_layers(self) -> list[nn.Linear]:
        return [] if self.out is None else [self.out]

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        u = reads.x.to(self.conv.weight.dtype)
        if self.into is None or self.out is None:
            y = self._convolved(u, ctx)
        else:
            first, second, u = linear(u, self.into.weight, self.into.bias).chunk(3, -1)
            y = linear(second * self._convolved(first * u, ctx), self.out.weight, self.out.bias)
        return F.dropout(without_padding(y, ctx), self.layout.dropout, self.training)

    def _convolved(self, u: Tensor, ctx: Context) -> Tensor:
        y = self.conv(u, ctx)
        return F.silu(y) if self.cfg.activation == "silu" else y
