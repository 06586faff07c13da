"""The two-axis hybrid in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.block_states import StatesTrace
from twoaxis.depth.depth_window_trace import DepthWindowTrace
from twoaxis.tape import Array
from twoaxis.types import Reads


class HybridTrace(StatesTrace):
    """In a block's first attention, before its W_o: a read of the last block states, and the gate."""

    cfg: Any

    def sublayer(self, state: Any, core: Any, block: int, index: int) -> Any:
        t, cfg, sources = self.t, self.cfg, state["sources"]
        x = sources.sources[-1] if index == 0 else state["stream"]
        place, heads = cfg.place(self.layout, block)
        letter = cfg.letter(block) if index == place else None
        reads: Any = Reads(x) if letter == "D" else super().read(x, block, index)[0]
        if letter is None:
            y = core(reads)
        else:
            seen = (*sources.last(cfg.read().n_sources(block)).sources[:-1], x)
            made = core(reads, None, lambda s: self.mixed(s, seen, heads, letter))
            with t.of("depth"):
                y = t.times(t.weight(1), t.state(made))
        return self.write(state, x, y, block, index)

    def mixed(self, s: Array | None, seen: tuple[Array, ...], heads: int, letter: str) -> Array:
        """G s + (1 - G) z, or the one of the two that there is, as W_o takes it."""
        t, d = self.t, self.layout.d_model
        with t.of("depth"):
            reads = [] if s is None else [self.normed(s)]
            if letter != "S":
                reads.append(self.normed(DepthWindowTrace(self.cfg.read(), self.layout, t).window_read(seen)))
            if letter == "B":
                gates = self.cfg.gate_width(heads, d)
                G = t.map("sigmoid", t.add(*[t.linear(x, gates) for x in reads]), keep="output")
                reads = [t.run("lerp", (*reads, G), t.like(reads[0]), keep=(*reads, G))]
            return t.cast(reads[0], t.itemsize)

    def normed(self, x: Array) -> Array:
        """rms(x) in at least float32."""
        return self.t.norm(self.t.cast(x, self.t.wide), gain=False)
