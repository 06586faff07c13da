"""Delta Attention Residuals in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.history import History
from twoaxis.depth.trace import Trace
from twoaxis.ops import traced
from twoaxis.ops.traced_reads import known_read
from twoaxis.tape import Array
from twoaxis.types import Reads


class DeltaTrace(Trace):
    """A read that is added to the stream."""

    cfg: Any

    def open(self, x: Array) -> Any:
        sources = self.sources() if self.cfg.released else self.sources().push(x, 0)  # type: ignore[arg-type]
        return {"stream": x, "sources": sources}

    def added(self, H: Array, sources: list[Array], of_values: bool) -> list[Array]:
        """g READ(sources), and of_values another."""
        t = self.t
        if self.cfg.null_source:
            null = Array(H.numbers, H.width, H.itemsize, parameter=True)
            sources = [null, *sources]
        if self.cfg.pre_gated:
            g = t.state(self.sigmoid(H))
            sources = [t.times(g, v) for v in sources]
        if len(sources) == 1:
            return [self.gated(sources[0], H)]
        gain, queries = self.cfg.key_gain, [t.weight(H.width) for _ in range(1 + of_values)]
        known = 0 if self.cfg.null_source or self.cfg.pre_gated else 1
        reads = [known_read(t, query, sources, gain, output_norm=False) for query in queries[:known]]
        reads += [traced.depth_read(t, query, sources, normed=True, gain=gain) for query in queries[known:]]
        return [self.gated(read, H) for read in reads]

    def gated(self, read: Array, H: Array) -> Array:
        """g times a read."""
        t, gate = self.t, self.cfg.gate
        if gate == "none":
            return read
        g = self.sigmoid(H) if gate == "vector" else t.weight(1)
        if gate == "scalar":
            g = t.map("sigmoid", g, keep="output")
        return t.state(t.times(read, g))

    def sigmoid(self, H: Array) -> Array:
        """Of W H + c."""
        t = self.t
        return t.map("sigmoid", t.linear(t.cast(H, t.wide), H.width, bias=True), keep="output")

    def read(self, state: Any, block: int, index: int) -> tuple[Any, Any]:
        cfg, H, sources = self.cfg, state["stream"], state["sources"]
        first = block == index == 0
        seen = [] if first else list(sources.sources)
        reads = bool(cfg.n_sources(self.layout, block, index)) or cfg.null_source
        values = cfg.reads_values(self.layout, block, index)
        added = self.added(H, seen, values) if reads else []
        normed = [self.t.norm(self.t.add(H, z)) for z in added] or [self.t.norm(H)]
        read = Reads(normed[0], value=normed[1] if values else None)  # type: ignore[arg-type]
        if cfg.released and index == 0 and block % cfg.source_blocks == 0:
            new = self.t.add(H, sources.sources[-1]) if len(sources) else H
            state = {**state, "sources": self.pushed(sources, new)}
        return read, state

    def pushed(self, sources: History, new: Any) -> History:
        """One more source, as far back as reads see."""
        grown = sources.push(new, sources.index[-1] + 1 if len(sources) else 0)
        return grown.last(self.cfg.window_sources or len(grown))

    def write(self, state: Any, carry: Any, y: Array, block: int, index: int) -> Any:
        cfg, sources = self.cfg, carry["sources"]
        y = self.t.state(y)
        stream = {"stream": self.t.add(carry["stream"], y)}
        s = self.layout.sublayer(block, index)
        if s == self.layout.n_sublayers - 1:
            return stream
        if cfg.form == "sublayer":
            return {**stream, "sources": self.pushed(sources, y)}
        if not cfg.sums(self.layout, block):
            return {**stream, "sources": sources}
        partial = self.t.add(*([carry["partial"]] if "partial" in carry else []), y)
        if self.closes(block, index) and (block + 1) % cfg.source_blocks == 0:
            return {**stream, "sources": self.pushed(sources, partial)}
        return {**stream, "sources": sources, "partial": partial}

    def close(self, state: Any) -> Array:
        return super().close(state["stream"])
