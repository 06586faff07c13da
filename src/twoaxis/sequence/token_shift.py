"""Token shift (RWKV): every channel looks one token back, by its own share.

    y_t = u_t + mu * (u_{t-1} - u_t),  u_{-1} = 0 at the start of a document        (arXiv 2305.13048; fla-org)

A convolution with taps (mu, 1 - mu); the identity at mu = 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.ops.traced_tokens import causal_conv
from twoaxis.sequence.convolution import TokenMemory, conv_cost, without_padding
from twoaxis.sequence.mixer import Between, Mixer, Place, SequenceConfig
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "token_shift")
class TokenShift(Mixer):
    """A mix of each token with the one before it, learned per channel."""

    equation = "y_t = u_t + mu * (u_{t-1} - u_t)"
    source = "arXiv 2305.13048"

    class Config(SequenceConfig):
        """mu: what every channel's share starts at; 0 is the identity."""

        mu: float = 0.0

        def halo_in(self, block: int = 0) -> int | None:
            return 1

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens",
                weights="static",
                sharing="per block and channel",
                short_swa="no: weights by distance, not by content",
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            both = conv_cost(shape, shape.layout.d_model, 2)
            return Cost(
                parameters=shape.layout.d_model,
                flops_forward=both.flops_forward,
                flops_backward=both.flops_backward,
                decode_state_bytes=both.decode_state_bytes,
            )

        def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
            taps = t.run("stack", (t.weight(reads.x.width),), t.table(2 * reads.x.width), launches=2)
            return t.dropout(causal_conv(t, reads.x, taps, 2), at.layout.dropout)

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        self.mu = nn.Parameter(torch.full((layout.d_model,), cfg.mu))
        self.memory = TokenMemory(layout.d_model, 2)

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        u = reads.x.to(self.mu.dtype)
        y = self.memory(u, torch.stack((self.mu, 1 - self.mu), -1), ctx)
        return F.dropout(without_padding(y, ctx), self.layout.dropout, self.training)
