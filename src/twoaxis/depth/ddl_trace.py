"""Deep Delta Learning in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.trace import Trace
from twoaxis.ops import traced, traced_tokens
from twoaxis.tape import Array
from twoaxis.types import Reads


class DDLTrace(Trace):
    """Compressor, gate and target, rewrite."""

    cfg: Any

    def open(self, x: Array) -> Any:
        t, cfg = self.t, self.cfg
        if not cfg.expanded:
            return x
        if not cfg.embeds:
            return t.run("repeat", (x,), t.array(x.width * cfg.value_dim, x.itemsize))
        weight = t.weight(x.width * cfg.value_dim * cfg.embed_kernel)
        return traced_tokens.causal_conv(t, x, weight, cfg.embed_kernel, channels=cfg.value_dim)

    def compress(self, X: Array, number: int) -> Array:
        """u (B, T, d), of the state before sublayer `number` of the network."""
        t, cfg, d, m = self.t, self.cfg, self.layout.d_model, self.cfg.value_dim
        if not cfg.expanded:
            return X
        weight = t.weight(d * m * cfg.taps)
        if cfg.compressor == "token":
            wide, read = (
                traced_tokens.causal_conv(t, t.cast(X, t.wide), weight, cfg.taps, flat=False),
                t.weight(m),
            )
            made = t.array(d, t.wide)
            t.run("compress", (wide, read), made, keep=(wide, read), flops=2 * wide.numbers, launches=2)
            return t.state(made)
        if cfg.compressor == "channel":
            turned = t.run("flip", (weight,), t.table(d * m * m), launches=2)
            weight = t.run("fold", (turned,), t.table(d * m), keep=(turned,), launches=2)
        return traced.channel_read(t, X, weight, d, None if cfg.write_only else number)

    def read(self, state: Any, block: int, index: int) -> tuple[Any, tuple[Array, Array]]:
        u = self.compress(state, self.layout.sublayer(block, index))
        c = self.t.norm(u)
        return Reads(c), self.control(u, c)  # type: ignore[arg-type]

    def control(self, u: Array, c: Array) -> tuple[Array, Array]:
        """Target and gate."""
        t, cfg = self.t, self.cfg
        inner = t.cast(c, t.wide)
        if cfg.gate == "mlp":
            inner = t.map("tanh", t.linear(inner, cfg.gate_hidden), keep="output")
        gate = t.map("sigmoid", t.linear(inner, 1, bias=True), keep="output")
        beta = t.map("scale", gate, keep="nothing")
        if cfg.target_const is not None:
            return t.array(cfg.value_dim, t.wide, constant=True), beta
        read = u if cfg.target_source == "raw" else c
        v = t.linear(t.cast(read, t.wide), cfg.value_dim, cfg.target_bias)
        if cfg.target_act == "sigmoid":
            v = t.map("scale", t.map("sigmoid", v, keep="output"), keep="nothing")
        return v, beta

    def write(self, state: Any, carry: tuple[Array, Array], y: Array, block: int, index: int) -> Any:
        t, (v, beta) = self.t, carry
        if not self.cfg.write_only:
            number = self.layout.sublayer(block, index) if self.cfg.expanded else None
            return traced.delta_rewrite(t, state, y, v, beta, number)
        X, h = t.cast(state, t.wide), t.cast(y, t.wide)
        length, k = t.array(1, t.wide), t.like(h)
        t.run("length", (h,), length, keep=(h, length), launches=5)
        t.run("unit", (h, length), k, keep=(h, length))
        step = t.times(beta, v)
        made = t.run("write", (X, k, step), t.like(X), keep=(k, step), flops=2 * X.numbers)
        return t.state(made)

    def close(self, state: Any) -> Array:
        return super().close(self.compress(state, self.layout.n_sublayers))
