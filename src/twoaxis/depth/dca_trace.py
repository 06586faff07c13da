"""DeepCrossAttention in sizes alone."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.connection import qkv_index
from twoaxis.depth.history import History
from twoaxis.depth.trace import Trace
from twoaxis.ops import traced
from twoaxis.tape import Array
from twoaxis.types import Reads


class DCATrace(Trace):
    """A block's three reads of its sources, and sums of branches."""

    cfg: Any

    def open(self, x: Array) -> Any:
        return {"sources": self.sources().push(x, 0)}  # type: ignore[arg-type]

    def grn(self, state: Any, reads: int) -> list[Array]:
        """The mixtures of all sources."""
        t, d = self.t, self.layout.d_model
        first, *others = state["sources"].sources
        sources = (first, *(x for name, x in state.items() if name.startswith("middle.")), *others)
        if self.cfg.grn != "v3":
            return [traced.mix(t, sources) for _ in range(reads)]
        gate = t.weight(reads * d)
        if self.cfg.gate_norm:
            gate = t.run("mul", (gate, t.weight(d)), t.table(reads * d))
        return traced.gated_mix(t, sources, reads, gate, self.cfg.gate_norm)

    def read(self, state: Any, block: int, index: int) -> tuple[Any, Any]:
        if index == 0:
            state = {**state, **dict(zip(("query", "key", "value"), self.grn(state, 3), strict=True))}
        takes = index == qkv_index(self.layout, block, self.cfg.name)
        so_far = [state["branch"]] if "branch" in state else []
        names = ("query", "key", "value") if takes else ("query",)
        normed = [self.t.norm(self.t.add(state[name], *so_far)) for name in names]
        if takes:
            state = {name: x for name, x in state.items() if name not in ("key", "value")}
        return Reads(*normed), state  # type: ignore[arg-type]

    def write(self, state: Any, carry: Any, y: Array, block: int, index: int) -> Any:
        branch = self.t.add(*([carry["branch"]] if "branch" in carry else []), self.t.state(y))
        if not self.closes(block, index):
            return {**carry, "branch": branch}
        history: History = carry["sources"].push(branch, block + 1)
        single, pooled = set(self.cfg.single(block + 2)), self.cfg.pooled(block + 2)
        kept = {"sources": history.keep(single.__contains__)}
        if not pooled:
            return kept
        middle: list[Any] = [x for name, x in carry.items() if name.startswith("middle.")]
        middle += history.keep(lambda i: i not in single).sources
        return {**kept, f"middle.{pooled}": self.t.add(*middle)}

    def close(self, state: Any) -> Array:
        (mixture,) = self.grn(state, 1)
        return super().close(mixture)
