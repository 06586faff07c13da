"""SiLU increment: the loose formula that some notes call Deep Delta Learning. A toy; the method is `ddl`.

x' = x + a D sigmoid(D) = x + a SiLU(D),   D = f(norm(x)),  a = 0.1          (in secondary texts, no paper)

 x ──┬── norm ── f ── a SiLU ──┐
     └─────────────────────────+── x'

Nothing is read, compared or erased: an additive branch whose outputs are never below -0.28 a.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, State
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("depth", "silu_increment")
class SiLUIncrement(Connection):
    """read: norm(x); write: x + a SiLU(y)."""

    equation = "x' = x + a D sigmoid(D), D = f(norm(x))"
    source = "secondary texts; not arXiv 2601.00417"

    class Config(DepthConfig):
        """scale: a."""

        scale: float = 0.1

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="branch", weights="fixed", short_swa="no: every weight is a and nothing is compared"
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return self.network_cost(shape, 0, 0)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)

    def read(self, state: State, ctx: Context) -> tuple[Reads, None]:
        return Reads(self.norm(state)), None

    def write(self, state: State, carry: None, y: Tensor, ctx: Context) -> State:
        return state + self.cfg.scale * F.silu(y.to(state.dtype))


class SiLUTrace(Trace):
    """The same in sizes alone."""

    def write(self, state: State, carry: Any, y: Array, block: int, index: int) -> State:
        grown = self.t.map("silu", self.t.state(y))
        return self.t.add(state, self.t.map("scale", grown, keep="nothing"))


SiLUIncrement.Config.trace = SiLUTrace
