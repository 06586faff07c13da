"""Attention Residuals in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.trace import Trace
from twoaxis.ops import traced
from twoaxis.ops.traced_reads import known_read
from twoaxis.tape import Array
from twoaxis.types import Reads


class AttnResTrace(Trace):
    """Reads of all sources or a window of them; the operator folds the norm in."""

    cfg: Any

    def open(self, x: Array) -> Any:
        return {"sources": self.sources().push(x, 0)}  # type: ignore[arg-type]

    def mixture(self, state: Any, weighed: bool = True) -> Array:
        """The normed read; without weights of the sum."""
        t, sources = self.t, [*state["sources"].sources, *([state["partial"]] if "partial" in state else [])]
        if len(sources) == 1 or not weighed:
            ones = t.table(len(sources), self.t.state_itemsize, constant=True)
            return t.norm(traced.mix(t, sources, [ones]) if len(sources) > 1 else sources[0])
        cfg, d = self.cfg, self.layout.d_model
        rank = cfg.key_rank or d
        query = t.weight(rank)
        if cfg.query == "input":
            query = t.linear(t.norm(t.cast(sources[-1], t.wide), gain=False), rank)
        if rank == d and cfg.query == "static" and cfg.heads == 1:
            return known_read(t, query, sources, cfg.key_gain)
        if rank == d:
            return traced.depth_read(
                t, query, sources, normed=True, heads=cfg.heads, gain=cfg.key_gain, output_norm=True
            )
        keys = [x.view(rank) for x in sources]
        weights = traced.depth_read(t, query, keys, normed=True, weights_only=True, gain=cfg.key_gain)
        (mixed,) = traced.token_mix(t, sources, weights)
        return t.norm(mixed)

    def read(self, state: Any, block: int, index: int) -> tuple[Any, None]:
        return Reads(self.mixture(state)), None  # type: ignore[arg-type]

    def write(self, state: Any, carry: None, y: Array, block: int, index: int) -> Any:
        cfg, t = self.cfg, self.t
        closed, within = divmod(self.layout.sublayer(block, index), cfg.size)
        y, sources = t.state(y), state["sources"]
        partial = t.add(state["partial"], y) if within else y
        closes = within == cfg.size - 1
        if closes:
            sources = sources.push(partial, closed + 1)
        sources = sources.keep(cfg.kept(closed + 1 + closes, not closes).__contains__)
        return {"sources": sources} if closes else {"sources": sources, "partial": partial}

    def close(self, state: Any) -> Array:
        return self.mixture(state, self.cfg.readout == "read")
