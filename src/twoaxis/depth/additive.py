"""The standard residual stream.

x_{s+1} = x_s + f_s(norm(x_s))            pre-norm Transformer (arXiv 2002.04745)

 x ──┬── norm ── f ──┐
     └───────────────+── x'
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.depth import ahead
from twoaxis.depth.connection import Connection, DepthConfig, State, products_first
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart


@spec.register("depth", "additive")
class Additive(Connection):
    """read: norm(x); write: x + y."""

    equation = "x' = x + f(norm(x))"
    source = "arXiv 2002.04745"

    class Config(DepthConfig):
        """The standard residual has no options."""

        trace = Trace

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="branch", weights="fixed", short_swa="no: every weight is 1 and nothing is compared"
            )

        def standard_start(self) -> StandardStart:
            return "exact"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return self.network_cost(shape, 0, 0)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        rounds = products_first(layout.blocks[block][index])
        self.norm = RMSNorm(layout.d_model, layout.norm_eps, for_products=rounds)

    @property
    def opening(self) -> RMSNorm:
        return self.norm

    def read(self, state: State, ctx: Context) -> tuple[Reads, None]:
        return Reads(ahead.normed(self.norm, state)), None

    def write(self, state: State, carry: None, y: Tensor, ctx: Context) -> State:
        return ahead.add(self.norm, state, y)
