"""Options of Delta Attention Residuals, which sources they make, and what these cost."""

from __future__ import annotations

import math
from typing import Any, Literal

from twoaxis.depth.connection import DepthConfig, qkv_index
from twoaxis.depth.history import check_window, newest, source_specs
from twoaxis.errors import InputError
from twoaxis.types import Coordinates, Cost, Layout, Shape, StandardStart, TensorSpec


class DeltaConfig(DepthConfig):
    """Options.

    form: "sublayer" reads every sublayer output, "block" the sums over depth-blocks. source_blocks:
    the Transformer blocks in a depth-block. released: the block form as the public code runs it: a
    depth-block ends after its first sublayer's read, and its source is H minus the last source, not minus
    the last boundary's H, so that sources from the third on alternate. null_source: a learned vector
    (from 0) among the sources of each read. gate: g; "none" is 1, "scalar" sigmoid(c) and "vector"
    sigmoid(W H + c) with c from -2 and W from 0, "alpha" a scalar from 0. pre_gated: every source is
    multiplied by sigmoid(V H + b), V and b from 0, before keys and values are made of it. value_read: the
    block's first sublayer that takes them has values of a read with a query and gain of its own. key_gain,
    key_norm_eps: of the key's norm. window_sources: a read sees so many newest sources, None all.
    """

    keeps_history = True
    form: Literal["sublayer", "block"] = "sublayer"
    source_blocks: int = 3
    released: bool = False
    null_source: bool = False
    gate: Literal["none", "scalar", "vector", "alpha"] = "none"
    pre_gated: bool = False
    value_read: bool = False
    key_gain: bool = True
    key_norm_eps: float = 1e-7
    window_sources: int | None = None

    def check(self) -> None:
        check_window(self.name, "window_sources", self.window_sources)
        if self.source_blocks < 1:
            raise InputError(f"delta_attnres(source_blocks={self.source_blocks}): allowed is 1 or more")
        if self.form == "sublayer" and (self.released or self.source_blocks != 3):
            raise InputError(
                "delta_attnres(form='sublayer'): source_blocks and released are for form='block'"
            )
        if not (0 < self.key_norm_eps < math.inf or (self.key_norm_eps == 0 and not self.null_source)):
            raise InputError(
                f"delta_attnres(key_norm_eps={self.key_norm_eps}): allowed is a finite number of 0 or "
                "more, and above 0 with a null source"
            )

    def history_options(self, kind: str, count: int) -> dict[str, Any]:
        if kind == "window":
            return {"window_sources": count}
        return {"form": "block", "source_blocks": count}

    def n_sources(self, layout: Layout, block: int, index: int) -> int:
        """Sources of a sublayer's read, the null source not counted."""
        return len(newest(self.n_made(layout, block, index), self.window_sources))

    def n_made(self, layout: Layout, block: int, index: int) -> int:
        """Sources that there are at a sublayer's read, in the window or not."""
        if self.form == "sublayer":
            s = layout.sublayer(block, index)
            return s + 1 if s else 0
        finished, within = divmod(block, self.source_blocks)
        if self.released:
            return finished + (1 if within or index else 0)
        return 0 if block == index == 0 else finished + 1

    def sums(self, layout: Layout, block: int) -> bool:
        """Whether the depth-block that `block` belongs to becomes a source of a later read."""
        last = (block // self.source_blocks + 1) * self.source_blocks
        return self.form == "block" and not self.released and last < layout.n_blocks

    def reads(self, layout: Layout) -> list[int]:
        """The sources of every sublayer's read, the null source counted."""
        places = ((b, i) for b, kinds in enumerate(layout.blocks) for i in range(len(kinds)))
        return [self.n_sources(layout, b, i) + self.null_source for b, i in places]

    def reads_values(self, layout: Layout, block: int, index: int) -> bool:
        """Whether a sublayer's values have a read of their own: not where there is one source to read."""
        if not self.value_read or index != qkv_index(layout, block, "delta_attnres(value_read=True)"):
            return False
        return self.n_sources(layout, block, index) + self.null_source > 1

    def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
        """The state after `depth` blocks."""
        if depth == layout.n_blocks:
            return {"stream": tensor}
        if self.form == "sublayer":
            count = layout.sublayer(depth, 0) + 1
        elif self.released:
            count = -(-depth // self.source_blocks)
        else:
            count = depth // self.source_blocks + 1
        sources = source_specs("sources", newest(count, self.window_sources), tensor, layout)
        opened = depth % self.source_blocks and self.sums(layout, depth)
        return {"stream": tensor, **sources, **({"partial": tensor} if opened else {})}

    def coordinates(self) -> Coordinates:
        return Coordinates(
            source="branch" if self.form == "sublayer" else "block sum",
            weights="QK, static Q",
            normalizer="softmax",
            injection="add" if self.gate == "none" else "gated",
            reads_per_block=2,
            short_swa="extended: as attnres, added to the stream",
        )

    def standard_start(self) -> StandardStart:
        if self.gate == "alpha":
            return "exact"
        whole = self.form == "sublayer" and self.window_sources is None
        return "up to eps" if whole else "no"  # the mean of all outputs is H / n

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """6 n d flops per token and read of n sources, 2 d^2 for a vector gate and for one before the read;
        twice that backward.
        """
        layout, d = shape.layout, shape.layout.d_model
        reads = [n for n in self.reads(layout) if n]
        places = ((b, i) for b, kinds in enumerate(layout.blocks) for i in range(len(kinds)))
        of_values = [n for n, at in zip(self.reads(layout), places) if self.reads_values(layout, *at)]
        each = {"none": 0, "scalar": 1, "vector": d * d + d, "alpha": 1}[self.gate] + d * self.null_source
        each += (d * d + d) * self.pre_gated
        weighed = sum(n > 1 for n in [*reads, *of_values]) * d * (2 if self.key_gain else 1)
        flops = 6 * sum(n for n in [*reads, *of_values] if n > 1) * d
        flops += 2 * d * d * len(reads) * ((self.gate == "vector") + self.pre_gated)
        return self.network_cost(shape, weighed + each * len(reads), flops)
