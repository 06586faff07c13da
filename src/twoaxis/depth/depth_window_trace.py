"""The depth window in sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twoaxis.depth.block_states import StatesTrace
from twoaxis.ops import traced
from twoaxis.tape import Array


class DepthWindowTrace(StatesTrace):
    """One read of a window of block states before each block; `logits`, one a state, are added to all heads' scores."""

    cfg: Any

    def read(self, state: Any, block: int, index: int) -> tuple[Any, Any]:
        x = state.get("stream")
        if index == 0:
            seen = state["sources"].last(self.cfg.n_sources(block)).sources
            x = self.inject(seen[-1], self.window_read(seen))
        return super().read(x, block, index)[0], x

    def window_read(self, seen: tuple[Array, ...], logits: Sequence[Array] = ()) -> Array:
        """W_O z."""
        t, cfg, d = self.t, self.cfg, self.layout.d_model
        mixed = self.mixed(seen, logits) if len(seen) > 1 else [seen[-1]] * cfg.heads
        parts = [t.linear(t.cast(m, t.itemsize), d // cfg.heads) for m in mixed]
        z = t.run("cat", parts, t.array(d)) if len(parts) > 1 else parts[0]
        return t.linear(z, d) if cfg.output else z

    def mixed(self, seen: tuple[Array, ...], logits: Sequence[Array] = ()) -> list[Array]:
        """The window's states mixed, for each head."""
        t, cfg, d, n = self.t, self.cfg, self.layout.d_model, len(seen)
        width = d // cfg.heads
        q = t.linear(t.cast(seen[-1], t.itemsize), d)
        if cfg.position == "rope":
            keys = [t.linear(t.cast(x, t.itemsize), d) for x in seen]
            angles = [t.table(n * width // 2, max(4, t.itemsize), constant=True) for _ in range(2)]
            t.run("angles", (), *angles, launches=10)
            query, *keys = [
                t.run("rotate", (x, *angles), t.like(x), keep=angles, launches=5) for x in (q, *keys)
            ]
            rows = [Array(k.numbers, width, k.itemsize, k) for k in keys]
            stacked = self.stacked(logits, cfg.heads)
            weights = traced.depth_read(t, query, rows, normed=False, weights_only=True, keep=stacked)
            return traced.token_mix(t, seen, weights, cfg.heads)
        absorbed = [t.linear(q.view(width), d) for _ in range(cfg.heads)]
        return [
            traced.depth_read(t, query, seen, normed=False, keep=self.biases(n, logits)) for query in absorbed
        ]

    def biases(self, n: int, logits: Sequence[Array]) -> list[Array]:
        """What is added to one head's scores, as the operator keeps it."""
        t, learned = self.t, self.cfg.position == "bias"
        if learned and logits:
            by_age = t.weight(n)
            logits = [t.run("add", (by_age, x), t.like(x)) for x in logits]
        return self.stacked(logits) if logits else [t.table(n)] * learned

    def stacked(self, logits: Sequence[Array], heads: int = 1) -> list[Array]:
        """Logits (B, T) in one array, for each head."""
        t, n = self.t, len(logits)
        numbers = n * t.tokens * heads
        return [t.run("stack", logits, Array(numbers, n * heads, t.wide))] if n else []

    def inject(self, h: Array, z: Array) -> Array:
        """The block's input."""
        t, how = self.t, self.cfg.injection
        z = t.state(z)
        if how == "replace":
            return z
        if how == "add":
            return t.add(h, z)
        inner = t.norm(t.cast(h, t.wide), gain=False)
        g = t.map("sigmoid", t.linear(inner, 1, bias=True), keep="output")
        return t.run("addcmul", (h, g, z), t.like(h), keep=(g, z))
