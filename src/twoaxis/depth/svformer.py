"""SVFormer: every attention uses the values of the first; later layers have no W_v.

V'_n = V_1,  n > 1,   y = attention(q_n, k_n, V_1)                                      (arXiv 2410.17897)

 V_1 ──────────────────────────────┐
 norm(x) ── W_q, W_k ─ q_n, k_n ───┴─ attention ── + x
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Stream
from twoaxis.depth.first_value import FirstValue, FirstValueConfig, FirstValueStream
from twoaxis.depth.inside import attentions_before
from twoaxis.types import Cost, Layout, Shape


@spec.register("depth", "svformer")
class SVFormer(FirstValue):
    """read: norm(x); inside attention V is V_1; write: x + y.

    The sublayer with the network's first attention keeps W_v (were it a `parallel` of several attentions, all
    of them); every later attention is built without.
    """

    equation = "y = attention(q_n, k_n, V_1)"
    source = "arXiv 2410.17897"

    class Config(FirstValueConfig):
        """No options."""

        def readers(self, layout: Layout) -> list[int]:
            places = [(b, i) for b, kinds in enumerate(layout.blocks) for i in range(len(kinds))]
            counts = [len(attentions_before(layout, b, i)) for b, i in [*places[1:], (layout.n_blocks, 0)]]
            first = next((n for n in counts if n), 0)  # attentions up to the first sublayer that has one
            return [n for n in super().readers(layout) if n >= first]

        def core_options_at(self, layout: Layout, block: int, index: int) -> dict[str, Any]:
            return {"value_projection": not attentions_before(layout, block, index)}

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Nothing beyond the norms; what is saved shows in the cost of the cores."""
            return self.reading_cost(shape, 0, 0)

    def values(self, n: int, first: Tensor, own: Tensor | None, x: Tensor) -> Tensor:
        return first

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return FirstValueStream(cfg, layout)
