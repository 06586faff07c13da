"""SVFormer: every attention uses the values of the first; later layers have no W_v.

V'_n = V_1,  n > 1,   y = attention(q_n, k_n, V_1)                                      (arXiv 2410.17897)

 V_1 ──────────────────────────────┐
 norm(x) ── W_q, W_k ─ q_n, k_n ───┴─ attention ── + x

Decoding keeps V_1 once for all attentions that can use it as it is, and of each attention its keys: about half of
what other methods keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.cache import Remembers, Slot
from twoaxis.depth.connection import Stream
from twoaxis.depth.first_value import FirstValue, FirstValueConfig, FirstValueStream, FirstValueTrace
from twoaxis.depth.inside import attentions_before, configs_at
from twoaxis.types import DTYPES, Context, Cost, Layout, Shape


@spec.register("depth", "svformer")
class SVFormer(FirstValue, Remembers):
    """read: norm(x); inside attention V is V_1; write: x + y.

    The sublayer with the network's first attention keeps W_v (were it a `parallel` of several attentions, all
    of them); every later attention is built without. While decoding, the state's "value" starts with the rows of
    earlier tokens that the widest window among its readers sees.
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

        def sharing(self, layout: Layout) -> dict[tuple[int, int], list[int | None]]:
            """The sublayers (block, index) that keep no values of their own, with their attentions' windows.

            Those whose attentions use the values as they are given, and the first only if it has one attention.
            """
            found, later = {}, False
            for block, kinds in enumerate(layout.blocks):
                for index in range(len(kinds)):
                    configs = configs_at(layout, block, index)
                    before = len(attentions_before(layout, block, index))
                    plain = all(config.values_as_given for config in configs)
                    if configs and plain and (before or len(configs) == 1):
                        found[block, index] = [config.window_in(block) for config in configs]
                        later = later or before > 0
            return found if later else {}

        def rows_before(self, layout: Layout) -> int | None:
            """Rows of V_1 that are read before a token; None: all of them."""
            windows = [window for seen in self.sharing(layout).values() for window in seen]
            return None if None in windows else max(window for window in windows if window is not None) - 1

        def core_options_at(self, layout: Layout, block: int, index: int) -> dict[str, Any]:
            return {
                "value_projection": not attentions_before(layout, block, index),
                "value_cache": (block, index) not in self.sharing(layout),
            }

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Nothing beyond the norms but the one cache of values; what is saved shows in the cost of the cores."""
            cost, layout = self.network_cost(shape, 0, 0), shape.layout
            if not self.sharing(layout):
                return cost
            heads, width = self.heads(layout)
            rows = shape.cache_rows(self.rows_before(layout)) * shape.batch_size
            return cost + Cost(decode_state_bytes=rows * heads * width * DTYPES[shape.dtype].itemsize)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        sharing = cfg.sharing(layout)
        self.shares = (block, index) in sharing
        self.remembers = self.makes and bool(sharing)

    def begin(self, values: Tensor, dtype: torch.dtype, ctx: Context) -> tuple[Tensor, Tensor]:
        kept = values
        if ctx.cache is not None and self.remembers:
            kept = ctx.cache[self.slot_name].append(v=values)["v"]
        return kept.to(dtype), kept if self.shares else values

    def values(self, n: int, first: Tensor, own: Tensor | None, x: Tensor) -> Tensor:
        return first if self.shares else first[:, first.shape[1] - x.shape[1] :]

    def new_slot(
        self,
        batch_size: int,
        max_length: int | None,
        max_rollback: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slot:
        """V_1 of earlier tokens."""
        return Slot(
            batch_size,
            {"v": (self.cfg.heads(self.layout), dtype)},
            keep=self.cfg.rows_before(self.layout),
            max_rollback=max_rollback,
            max_length=max_length,
            device=device,
        )

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return FirstValueStream(cfg, layout)


SVFormer.Config.trace = FirstValueTrace
