"""mHC in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.hyper_connections import HyperTrace
from twoaxis.depth.trace import Trace
from twoaxis.tape import Array


class MHCTrace(HyperTrace):
    """Streams that are read, mixed and written by coefficients of all streams."""

    def coefficients(self, X: Array, sizes: list[int]) -> list[Array]:
        """The logits of each group, for each token or one for all."""
        t, total = self.t, sum(sizes)
        if not self.cfg.dynamic or not total:
            return [t.weight(size) for size in sizes]
        length, factor, group = t.array(1, t.wide), t.array(1, t.wide), t.table(total, 8, constant=True)
        t.run("length", (X,), length, keep=(X, length))
        t.run("rsqrt", (length,), factor, keep=(length, factor), launches=4)
        projected = t.linear(X, total)
        scaled, scales = (
            t.times(projected, factor),
            t.run("index", (group,), t.table(total, t.wide), keep=(group,)),
        )
        logits = t.run("addcmul", (scaled, scales), t.like(scaled), keep=(scaled, scales))
        return [logits.view(size) for size in sizes]

    def gate(self, logits: Array, changed: bool) -> Array:
        """Shares of the streams, then scaled or raised if that is `changed`."""
        t = self.t
        if not logits.width:
            return t.table(self.cfg.streams, t.wide, constant=True)
        made = t.map(self.cfg.gates, logits, keep="output")
        return t.map("scale", made, keep="nothing") if changed else made

    def mixing(self, R: Array) -> Array:
        """H, n x n."""
        t, n = self.t, self.cfg.streams
        rows = R.numbers // R.width
        if self.cfg.mixing == "permutations":
            shares = t.map("softmax", R, keep="output")
            table = t.table(R.width * n * n, constant=True)
            H = Array(rows * n * n, n * n, t.wide)
            return t.run(
                "matmul", (shares, table), H, keep=(table,), flops=2 * rows * R.width * n * n, back=1
            )
        turned = R if rows == 1 else t.run("copy", (R,), t.like(R))
        H = Array(rows * n * n, n * n, t.wide)
        passes = 2 * self.cfg.iterations or 1
        t.run("sinkhorn", (turned,), H, keep=(turned,), launches=passes + 1)
        return H if rows == 1 else t.run("copy", (H,), t.like(H))

    def read(self, state: Any, block: int, index: int) -> tuple[Any, Any]:
        t, X = self.t, self.t.cast(state, self.t.wide)
        P, Q, R = self.coefficients(X, self.cfg.sizes(self.layout, self.layout.sublayer(block, index)))
        P, Q = self.gate(P, self.cfg.eps > 0), self.gate(Q, True)
        H = self.mixing(R) if R.width else None
        h = t.state(t.matmul(P, X, 1, self.layout.d_model))
        return Trace.read(self, h, block, index)[0], (Q, H)

    def write(self, state: Any, carry: Any, y: Array, block: int, index: int) -> Any:
        t, (Q, H), n, d = self.t, carry, self.cfg.streams, self.layout.d_model
        X, o = t.cast(state, t.wide), t.cast(y, t.wide)
        if H is not None and H.numbers == H.width:
            H = t.run("copy", (H,), t.array(H.width, t.wide))
        mixed = X if H is None else t.matmul(H, X, n, d)
        return t.state(t.matmul(Q, o, n, d, plus=mixed))

    def close(self, state: Any) -> Array:
        if self.cfg.readout == "sum":
            return super().close(state)
        t, X = self.t, self.t.cast(state, self.t.wide)
        (logits,) = self.coefficients(X, [self.cfg.streams])
        weights = t.map("scale", t.map("sigmoid", logits, keep="output"), keep="nothing")
        return Trace.close(self, t.state(t.matmul(weights, X, 1, self.layout.d_model)))
