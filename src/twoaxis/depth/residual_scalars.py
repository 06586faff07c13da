"""Residual scalars and embedding scalars: the stream is scaled, and the embeddings come back at every depth.

x~ = a x + b x_0,   x' = x~ + f(norm(x~))        a from 1, b from 0   (github.com/KellerJordan/modded-nanogpt)

 x ──── a ── + ──┬── norm ── f ──┐
 x_0 ── b ───┘   └───────────────+── x'          per block or per sublayer; the first read has x = x_0
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State, Stream
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.ops import mix, traced
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "residual_scalars")
class ResidualScalars(Connection):
    """read: norm(a x + b x_0); write: a x + b x_0 + y.

    state: {"stream": x, "embedding": x_0 as long as a later read wants it}. weights = (a, b) start at (1,
    `embedding_start`) and are not decayed. The network's first read, where x is x_0, has none.
    """

    equation = "x' = a x + b x_0 + f(norm(a x + b x_0))"
    source = "github.com/KellerJordan/modded-nanogpt"

    class Config(DepthConfig):
        """scaled: at every "block" or "sublayer". embedding_start: b at the start; 0 is exactly standard."""

        scaled: Literal["block", "sublayer"] = "block"
        embedding_start: float = 0.0

        def scales(self, layout: Layout, block: int, index: int) -> bool:
            """Whether a sublayer's read has scalars."""
            return layout.sublayer(block, index) > 0 and (index == 0 or self.scaled == "sublayer")

        def reads(self, layout: Layout, block: int = 0) -> int:
            """The number of reads with scalars from `block` on."""
            places = ((b, i) for b in range(block, layout.n_blocks) for i in range(len(layout.blocks[b])))
            return sum(self.scales(layout, b, i) for b, i in places)

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            wanted = self.reads(layout, depth) > 0
            return {"stream": tensor, "embedding": tensor} if wanted else {"stream": tensor}

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream, and the embeddings",
                weights="static",
                sharing=f"per {self.scaled}",
                injection="replace",
                reads_per_block=1 if self.scaled == "block" else 2,
                short_swa="no: weights belong to depth positions and nothing is compared",
            )

        def standard_start(self) -> StandardStart:
            return "no" if self.embedding_start else "exact"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Two scalars per read; 4 d flops per token and read, twice that backward."""
            reads = self.reads(shape.layout)
            return self.network_cost(shape, 2 * reads, 4 * reads * shape.layout.d_model)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        scales = cfg.scales(layout, block, index)
        self.weights = nn.Parameter(torch.tensor([1.0, cfg.embedding_start])) if scales else None
        closes = index == len(layout.blocks[block]) - 1
        self.drops = closes and not cfg.reads(layout, block + 1)

    def read(self, state: State, ctx: Context) -> tuple[Reads, Tensor]:
        x = state["stream"]
        if self.weights is not None:
            x = mix((x, state["embedding"]), self.weights)
        return Reads(self.norm(x)), x

    def write(self, state: State, carry: Tensor, y: Tensor, ctx: Context) -> State:
        x = carry + y.to(carry.dtype)
        return {"stream": x} if self.drops or "embedding" not in state else {**state, "stream": x}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return ScalarStream(cfg, layout)


class ScalarStream(NamedStream):
    """Opens with the embeddings as x = x_0, closes with the final norm of x."""

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"stream": x, "embedding": x} if self.cfg.reads(self.layout) else {"stream": x}

    def unchanging(self, name: str) -> bool:
        return name == "embedding"


class ScalarTrace(Trace):
    """The same in sizes alone."""

    cfg: ResidualScalars.Config

    def unchanging(self, name: str) -> bool:
        return name == "embedding"

    def open(self, x: Array) -> State:
        return {"stream": x, "embedding": x} if self.cfg.reads(self.layout) else {"stream": x}

    def read(self, state: State, block: int, index: int) -> tuple[Any, Array]:
        x: Array = state["stream"]
        if self.cfg.scales(self.layout, block, index):
            x = traced.mix(self.t, (x, state["embedding"]))
        return super().read(x, block, index)[0], x

    def write(self, state: State, carry: Array, y: Array, block: int, index: int) -> State:
        x = super().write(carry, None, y, block, index)
        drops = self.closes(block, index) and not self.cfg.reads(self.layout, block + 1)
        return {"stream": x} if drops or "embedding" not in state else {**state, "stream": x}

    def close(self, state: State) -> Array:
        return super().close(state["stream"])


ResidualScalars.Config.trace = ScalarTrace
