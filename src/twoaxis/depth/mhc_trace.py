"""mHC in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.hyper_trace import HyperTrace
from twoaxis.ops import traced_streams
from twoaxis.tape import Array
from twoaxis.types import Reads


class MHCTrace(HyperTrace):
    """Streams that are read, mixed and written by coefficients of all streams."""

    def coefficients(self, X: Array, sizes: list[int], number: int) -> list[Array]:
        """The logits of each group, for each token or one for all, of the streams before sublayer `number`."""
        t, total = self.t, sum(sizes)
        if not self.cfg.dynamic or not total:
            return [t.weight(size) for size in sizes]
        group = t.table(total, 8, constant=True)
        scaled = traced_streams.joint_scores(t, X, total, number)
        scales = t.run("index", (group,), t.table(total, t.wide), keep=(group,))
        return self.logits(scaled, scales, sizes)

    def logits(self, scores: Array, scales: Array, sizes: list[int]) -> list[Array]:
        """a scores + b, by groups."""
        made = self.t.run("addcmul", (scores, scales), self.t.like(scores), keep=(scores, scales))
        return [made.view(size) for size in sizes]

    def gates(self, X: Array, sizes: list[int], number: int) -> tuple[Array, Array, Array | None]:
        """P, Q and H, of the streams before sublayer `number`."""
        cfg, t = self.cfg, self.t
        if cfg.mixing == "sinkhorn" and cfg.gates == "sigmoid" and cfg.dynamic:
            scores = traced_streams.joint_scores(t, X, sum(sizes), number)
            made = None if cfg.eps else traced_streams.gates(t, scores, cfg.streams, sizes[2] > 0)
            if made is not None:
                return made
            P, Q, R = self.logits(scores, t.run("cat", (), t.table(sum(sizes), t.wide)), sizes)
        else:
            P, Q, R = self.coefficients(X, sizes, number)
        P, Q = self.gate(P, cfg.eps > 0), self.gate(Q, True)
        return P, Q, self.mixing(R) if R.width else None

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
        number = self.layout.sublayer(block, index)
        P, Q, H = self.gates(state, self.cfg.sizes(self.layout, number), number)
        x = traced_streams.stream_read(self.t, state, self.layout.d_model, P, number)
        return Reads(x), (Q, H)  # type: ignore[arg-type]

    def write(self, state: Any, carry: Any, y: Array, block: int, index: int) -> Any:
        Q, H = carry
        return traced_streams.stream_write(self.t, state, H, Q, y, self.layout.sublayer(block, index))

    def close(self, state: Any) -> Array:
        if self.cfg.readout == "sum":
            return super().close(state)
        t, number = self.t, self.layout.n_sublayers
        (logits,) = self.coefficients(state, [self.cfg.streams], number)
        weights = t.map("scale", t.map("sigmoid", logits, keep="output"), keep="nothing")
        return traced_streams.stream_read(t, state, self.layout.d_model, weights, number)
