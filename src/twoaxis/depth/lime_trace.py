"""LIMe in sizes alone; its dynamic form is beside that."""

from __future__ import annotations

from typing import Any

from twoaxis.depth.history import History
from twoaxis.depth.inside import attentions_at, attentions_before
from twoaxis.depth.lime_dynamic import DynamicTrace
from twoaxis.depth.trace import Trace
from twoaxis.ops import traced
from twoaxis.tape import Array, Tape
from twoaxis.types import Layout


def lime_trace(cfg: Any, layout: Layout, tape: Tape) -> Trace:
    """The trace of either form."""
    return (DynamicTrace if cfg.kind == "dynamic" else LIMeTrace)(cfg, layout, tape)


class LIMeTrace(Trace):
    """Keys and values mixed from those of all layers so far."""

    cfg: Any

    def open(self, x: Array) -> Any:
        return {"stream": x, "sources": self.sources()}

    def sublayer(self, state: Any, core: Any, block: int, index: int) -> Any:
        t, sources = self.t, state["sources"]
        reads, _ = self.read(state["stream"], block, index)
        found = attentions_before(self.layout, self.layout.n_blocks)
        n = len(attentions_before(self.layout, block, index))
        ends = n + len(attentions_at(self.layout, block, index)) == len(found)

        def between(q: Array, k: Array, v: Array | None) -> tuple[Array, Array, Array]:
            nonlocal sources, n
            assert v is not None
            widths = k.width, v.width
            with t.of("depth"):
                own = t.run("cat", [t.state(x) for x in (k, v)], t.array(sum(widths), t.state_itemsize))
                if n:
                    rows, heads = (*sources.sources, own), [a.heads for a in found[: n + 1]]
                    routed = traced.head_mix(t, rows, heads, heads[n])
                    copies = (t.run("copy", (routed,), t.array(w, routed.itemsize)) for w in widths)
                    k, v = (t.cast(x, q.itemsize) for x in copies)
                sources = sources.push(own, n)
            n += 1
            return q, k, v

        x = self.write(state["stream"], None, core(reads, between), block, index)
        return {"stream": x, "sources": History() if ends else sources}

    def close(self, state: Any) -> Array:
        return super().close(state["stream"])
