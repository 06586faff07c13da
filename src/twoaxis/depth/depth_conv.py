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
from twoaxis.depth.connection import BlockStates, Connection, DepthConfig, State, Stream
from twoaxis.depth.history import source_specs
from twoaxis.depth.trace import Trace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import mix, traced
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "depth_conv")
class DepthConv(Connection):
    """read: norm(sum_s w_s h(l-s)) at a block's first sublayer, else norm(x); write: x + y.

    state: {"sources": the block states that the next read sees, h(l) the newest}; inside a block also
    {"stream": x}. w (d, taps), the last tap at the current state as in a causal convolution, starts at one
    there and zero elsewhere and is not decayed.
    """

    equation = "x_l = sum_{s<K} w[:, K-1-s] * h(l-s), per channel"
    source = "derived from arXiv 2603.16039 (ShortConv along depth)"

    class Config(DepthConfig):
        """kernel: K, the block states read, the current one included. shared: one w for all blocks, which is
        the convolution, or one for each block.
        """

        keeps_history = True
        kernel: int = 4
        shared: bool = True

        def check(self) -> None:
            if self.kernel < 1:
                raise InputError(
                    f"depth_conv(kernel={self.kernel}): allowed is 1 or more (the current state counts)"
                )

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"kernel": count} if kind == "window" else {}

        def taps(self, depth: int) -> int:
            """min(K, l + 1), the states seen by the read after `depth` blocks."""
            return min(self.kernel, depth + 1)

        def kept(self, depth: int, n_blocks: int) -> int:
            """How many states the next read needs; after the last block, that block's own."""
            return self.taps(depth) if depth < n_blocks else 1

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            oldest = depth + 1 - self.kept(depth, layout.n_blocks)
            return source_specs("sources", range(oldest, depth + 1), tensor, layout, carried=True)

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
            taps = [self.taps(depth) for depth in range(layout.n_blocks)]
            parameters = d * (max(taps) if self.shared else sum(taps))
            return self.network_cost(shape, parameters, 2 * d * sum(taps))

    taps: DepthTaps | None

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: DepthTaps | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.opens, self.closes = index == 0, index == len(layout.blocks[block]) - 1
        self.window = cfg.taps(block)  # of the read before this block
        self.kept = cfg.kept(block + 1, layout.n_blocks)
        if not self.opens:
            self.taps = None
        elif not cfg.shared:
            self.taps = DepthTaps(layout.d_model, self.window)
        elif shared is not None:
            self.__dict__["taps"] = shared  # the stream registers them, once
        else:
            raise InputError("depth_conv(shared=True) is built for the whole network; use DepthConv.network")

    def read(self, state: State, ctx: Context) -> tuple[Reads, Tensor]:
        seen = state["sources"].last(self.window).sources
        x = state["stream"] if self.taps is None else self.taps(seen)
        return Reads(self.norm(x)), x

    def write(self, state: State, carry: Tensor, y: Tensor, ctx: Context) -> State:
        x, sources = carry + y.to(carry.dtype), state["sources"]
        if self.closes:
            return {"sources": sources.push(x, carried=True).last(self.kept)}
        return {"sources": sources, "stream": x}

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        shared = DepthTaps(layout.d_model, cfg.taps(layout.n_blocks - 1)) if cfg.shared else None
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


class DepthConvStream(BlockStates):
    """Opens with the embeddings as h(0), closes with the final norm of h(L); owns shared taps."""

    def __init__(self, cfg: Any, layout: Layout, shared: DepthTaps | None) -> None:
        super().__init__(cfg, layout)
        self.taps = shared


class DepthConvTrace(Trace):
    """The same in sizes alone."""

    cfg: DepthConv.Config

    def open(self, x: Array) -> State:
        return {"sources": self.sources().push(x, 0, carried=True)}  # type: ignore[arg-type]

    def read(self, state: State, block: int, index: int) -> tuple[Any, Array]:
        seen = state["sources"].last(self.cfg.taps(block)).sources
        x = traced.mix(self.t, seen) if index == 0 else state["stream"]
        return super().read(x, block, index)[0], x

    def write(self, state: State, carry: Array, y: Array, block: int, index: int) -> State:
        x = super().write(carry, None, y, block, index)
        if self.closes(block, index):
            kept = self.cfg.kept(block + 1, self.layout.n_blocks)
            return {"sources": state["sources"].push(x, block + 1, carried=True).last(kept)}
        return {"sources": state["sources"], "stream": x}

    def close(self, state: State) -> Array:
        return super().close(state["sources"].sources[-1])


DepthConv.Config.trace = DepthConvTrace
