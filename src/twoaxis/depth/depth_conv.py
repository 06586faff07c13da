"""Depth convolution: ShortConv transposed to depth, a per-channel static sum of the last K block states.

x_l = sum_{s=0..K-1} w[:, K-1-s] * h(l-s),   h(j) = 0 for j < 0    derived from arXiv 2603.16039

 h(l-K+1) .. h(l-1) ──┐
 h(l) ────────── w ───+── x_l ── block l+1 ── h(l+1)      one read per block, before its first sublayer

On the stack of states this is the depthwise causal convolution along layers, exactly. The duality paper puts
ShortConv and Canon layers on its sequence axis and attention on both; this is the square it leaves empty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.block_states import StatesConfig, StatesConnection, StatesStream, StatesTrace
from twoaxis.depth.connection import Connection, State, Stream
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import mix, traced
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart


@spec.register("depth", "depth_conv")
class DepthConv(StatesConnection):
    """read: norm(sum_s w_s h(l-s)) at a block's first sublayer, else norm(x); write: x + y.

    state: {"sources": the block states that the next read sees, h(l) the newest}; inside a block also
    {"stream": x}. w (d, taps), the last tap at the current state as in a causal convolution, starts at one
    there and zero elsewhere and is not decayed.
    """

    equation = "x_l = sum_{s<K} w[:, K-1-s] * h(l-s), per channel"
    source = "derived from arXiv 2603.16039 (ShortConv along depth)"

    class Config(StatesConfig):
        """kernel: K, the block states read, the current one included. shared: one w for all blocks, which is
        the convolution, or one for each block.
        """

        kernel: int = 4
        shared: bool = True

        def check(self) -> None:
            if self.kernel < 1:
                raise InputError(
                    f"depth_conv(kernel={self.kernel}): allowed is 1 or more (the current state counts)"
                )

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"kernel": count} if kind == "window" else {}

        def n_sources(self, depth: int) -> int:
            """min(K, l + 1), the states seen by the read after `depth` blocks."""
            return min(self.kernel, depth + 1)

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="static",
                sharing="network" if self.shared else "per block",
                injection="replace",
                reads_per_block=1,
                short_swa="no: weights belong to distances and nothing is compared",
            )

        def standard_start(self) -> StandardStart:
            return "exact"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """2 d flops per token and tap, twice that backward."""
            layout, d = shape.layout, shape.layout.d_model
            taps = [self.n_sources(depth) for depth in range(layout.n_blocks)]
            parameters = d * (max(taps) if self.shared else sum(taps))
            return self.network_cost(shape, parameters, 2 * d * sum(taps))

    taps: DepthTaps | None

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: DepthTaps | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.window = cfg.n_sources(block)  # of the read before this block
        if self.opens:
            self.attach("taps", shared, lambda: DepthTaps(layout.d_model, self.window))
        else:
            self.taps = None

    def read(self, state: State, ctx: Context) -> tuple[Reads, Tensor]:
        seen = state["sources"].last(self.window).sources
        x = state["stream"] if self.taps is None else self.taps(seen)
        return Reads(self.norm(x)), x

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        shared = DepthTaps(layout.d_model, cfg.n_sources(layout.n_blocks - 1)) if cfg.shared else None
        blocks = cls.every(cfg, layout, shared)
        return DepthConvStream(cfg, layout, shared), blocks


class DepthTaps(nn.Module):
    """w (d, taps): the last tap weighs the current state, the one before it the previous one."""

    def __init__(self, d: int, taps: int) -> None:
        super().__init__()
        one_hot = torch.zeros(d, taps)
        one_hot[:, -1] = 1
        self.weight = nn.Parameter(one_hot)

    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        """x (B, T, d) from the last states, oldest first."""
        return mix(states, self.weight.mT[-len(states) :])


class DepthConvStream(StatesStream):
    """Opens with the embeddings as h(0), closes with the final norm of h(L); owns shared taps."""

    def __init__(self, cfg: Any, layout: Layout, shared: DepthTaps | None) -> None:
        super().__init__(cfg, layout)
        self.taps = shared


class DepthConvTrace(StatesTrace):
    """The same in sizes alone."""

    cfg: DepthConv.Config

    def read(self, state: State, block: int, index: int) -> tuple[Any, Array]:
        seen = state["sources"].last(self.cfg.n_sources(block)).sources
        x = traced.mix(self.t, seen) if index == 0 else state["stream"]
        return super().read(x, block, index)[0], x


DepthConv.Config.trace = DepthConvTrace
