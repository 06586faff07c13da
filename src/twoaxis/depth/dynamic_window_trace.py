"""The dynamic depth window in sizes alone, each read as wide as it can be."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.depth_window_trace import DepthWindowTrace
from twoaxis.depth.trace import Trace
from twoaxis.tape import Array


class DynamicWindowTrace(DepthWindowTrace):
    """Reads of a window of block states, and for each token the numbers that hide the older ones."""

    def open(self, x: Array) -> Any:
        share = self.t.array(1, self.t.wide, constant=True)
        return {**super().open(x), "share": self.t.run("zeros", (), share)}

    def read(self, state: Any, block: int, index: int) -> tuple[Any, Any]:
        x, share = state.get("stream"), state["share"]
        if index == 0:
            seen = state["sources"].last(self.cfg.n_sources(block)).sources
            logits: list[Array] = []
            if block:
                K, logits = self.chosen(seen[-1], len(seen))
                share = self.shared(share, K)
            x = self.inject(seen[-1], self.window_read(seen, logits))
        return Trace.read(self, x, block, index)[0], (x, share)

    def chosen(self, h: Array, n: int) -> tuple[Array, list[Array]]:
        """K_t, and log m of n states."""
        t, gates = self.t, self.cfg.form == "gates"
        scores = t.linear(t.norm(t.cast(h, t.wide), gain=False), n - 1 if gates else 1, bias=True)
        own = t.run("zeros", (), t.table(1, t.wide, constant=True))
        if gates:
            buffer = t.like(scores)
            opened = t.run("logsigmoid", (scores,), t.like(scores), buffer, keep=(scores, buffer))
            logs = t.map("cumsum", opened, keep="nothing")
            K = t.run("sum", (t.map("exp", logs, keep="output"),), t.array(1, t.wide), launches=2)
            return K, [own, *(logs.view(1) for _ in range(n - 1))]
        sigmoid = t.map("sigmoid", scores, keep="output")
        K = t.run("scale", (sigmoid,), t.like(sigmoid), launches=3)  # and the widest of them
        return K, [own, *(self.log_mask(K) for _ in range(n - 1))]

    def log_mask(self, K: Array) -> Array:
        """log clip((R + K - 1 - z) / R, 0, 1)."""
        t = self.t
        m = t.run("ramp", (K,), t.like(K), launches=4)
        hidden = t.run("hidden", (m,), Array(m.numbers, 1, 1, constant=True))
        clipped = t.run("clip", (m, hidden), t.like(m), keep=(m, hidden), launches=2)
        return t.run("log", (clipped, hidden), t.like(m), keep=(clipped, hidden), launches=2)

    def shared(self, share: Array, K: Array) -> Array:
        """The share of the windows read so far; a loss sees it only where training adds its term."""
        t = self.t
        seen = Array(K.numbers, 1, K.itemsize, K, constant=True)
        return t.run("share", (share, seen), t.array(1, t.wide, constant=True), launches=2)

    def write(self, state: Any, carry: Any, y: Array, block: int, index: int) -> Any:
        x, share = carry
        return {**super().write(state, x, y, block, index), "share": share}
