"""Hyper-Connections in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.connection import State
from twoaxis.depth.trace import Trace
from twoaxis.ops import traced_streams
from twoaxis.tape import Array
from twoaxis.types import Reads


class HyperTrace(Trace):
    """`HyperConnections` and its stream in sizes alone."""

    cfg: Any

    def open(self, x: Array) -> State:
        return self.t.run("repeat", (x,), self.t.array(x.width * self.cfg.streams, x.itemsize))

    def read(self, state: State, block: int, index: int) -> tuple[Any, Any]:
        n, number = self.cfg.streams, self.layout.sublayer(block, index)
        scores = self.scores(state, number) if self.cfg.dynamic else None
        made = None if scores is None else traced_streams.gates(self.t, scores, n)
        if made is None:
            weights = self.t.weight(n * (n + 2)) if scores is None else self.weights(scores)
            made = weights.view(n), weights.view(n), weights.view(n * n)
        reads, write, mixing = made
        x = traced_streams.stream_read(self.t, state, self.layout.d_model, reads, number)
        return Reads(x), (mixing, write)  # type: ignore[arg-type]

    def scores(self, H: Array, number: int) -> Array:
        """Of every token, from the streams before sublayer `number`."""
        t, n, d = self.t, self.cfg.streams, self.layout.d_model
        if self.cfg.norm == "layer":
            return traced_streams.stream_scores(t, H, d, n + 2, number)
        H = t.cast(H, t.wide)
        gain = t.run("add", (t.weight(d),), t.table(d, t.wide))
        matrix = t.run("mul", (gain,), t.table(d * (n + 2), t.wide), keep=(gain,))
        length = t.array(n, t.wide)
        t.run("length", (H,), length, keep=(H, length), launches=2)
        inverse = t.map("reciprocal", length, keep="output")
        factor = t.map("scale", inverse, keep="nothing")
        return t.times(t.linear(H, n + 2, of=d, weight=matrix), factor)

    def weights(self, scores: Array) -> Array:
        """[A_m | A_r | B] by torch's operations."""
        t, n = self.t, self.cfg.streams
        scale = t.run("cat", (), t.table(n + 2, t.wide))
        change = t.map("tanh", scores, keep="output") if self.cfg.tanh else scores
        return t.run("addcmul", (scale, change), t.like(change), keep=(scale, change))

    def write(self, state: State, carry: Any, y: Array, block: int, index: int) -> State:
        number = self.layout.sublayer(block, index)
        return traced_streams.stream_write(self.t, state, carry[0], carry[1], y, number)

    def close(self, state: State) -> Array:
        return super().close(self.t.run("sum", (state,), self.t.array(self.layout.d_model, state.itemsize)))
