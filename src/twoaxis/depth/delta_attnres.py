"""Delta Attention Residuals: the ordinary stream stays, and a depth read is added to what a sublayer sees.

h_s = H_s + g READ(w_s; x_0, y_1 .. y_{s-1}),   H_{s+1} = H_s + f_s(norm(h_s))              (arXiv 2605.18855)
READ(w; V) = sum_i a_i V_i,  a = softmax_i <w, gain * rms(V_i)>

 x_0, y_1 .. y_{s-1} ── READ ── g ┐
 H_s ──┬───────────────────────── + ── norm ── f ──┐
       └───────────────────────────────────────────+── H_{s+1}      end: norm(H)

The read is not written to the stream. Block form: sources are x_0 and what finished depth-blocks have added.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, NamedStream, State, Stream
from twoaxis.depth.delta_config import DeltaConfig
from twoaxis.depth.delta_read import DeltaRead
from twoaxis.depth.delta_trace import DeltaTrace
from twoaxis.depth.history import History
from twoaxis.norm import RMSNorm
from twoaxis.types import Context, Layout, Reads


@spec.register("depth", "delta_attnres")
class DeltaAttnRes(Connection):
    """read: norm(H + g READ(sources)); write: H + y.

    state: {"stream": H, "sources": x_0 and sublayer outputs or depth-block sums, until the last read};
    in block form also {"partial": what the open depth-block has added}. Nothing of it is decayed. A read of
    one source has no weights, the network's first sublayer reads nothing (or its null source).
    """

    equation = "h_s = H_s + READ(w_s; x_0, y_1 .. y_{s-1}), H' = H + f(norm(h_s))"
    source = "arXiv 2605.18855"

    class Config(DeltaConfig):
        """The options of `DeltaConfig`."""

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        count = cfg.n_sources(layout, block, index)
        values = cfg.reads_values(layout, block, index)
        self.route = DeltaRead(cfg, layout, count, values) if count or cfg.null_source else None
        s = layout.sublayer(block, index)
        self.first, self.last = s == 0, s == layout.n_sublayers - 1
        ends = index == len(layout.blocks[block]) - 1
        self.ends_group = ends and (block + 1) % cfg.source_blocks == 0
        self.sums = cfg.sums(layout, block)
        self.grows = cfg.released and index == 0 and block % cfg.source_blocks == 0

    def mixtures(self, state: State) -> list[Tensor]:
        """h_s (B, T, d), what the sublayer reads before its norm; with a read of their own what values read too."""
        H: Tensor = state["stream"]
        if self.route is None:
            return [H]
        return [H + read for read in self.route(() if self.first else state["sources"].sources, H)]

    def mixture(self, state: State) -> Tensor:
        """h_s (B, T, d)."""
        return self.mixtures(state)[0]

    def step(self, state: State) -> Reads | None:
        """The read where it is one call."""
        if self.route is None:
            return None
        x = self.route.step(state["sources"].sources, state["stream"], self.norm)
        return None if x is None else Reads(x)

    def read(self, state: State, ctx: Context) -> tuple[Reads, State]:
        reads = self.step(state)
        if reads is None:
            x, *value = (self.norm(h) for h in self.mixtures(state))
            reads = Reads(x, value=value[0] if value else None)
        if self.grows:
            sources: History = state["sources"]
            new = state["stream"] if not len(sources) else state["stream"] - sources.sources[-1]
            state = {**state, "sources": self.pushed(sources, new)}
        return reads, state

    def pushed(self, sources: History, new: Tensor) -> History:
        """The history with one more source, as far back as reads see."""
        grown = sources.push(new, sources.index[-1] + 1 if len(sources) else 0)
        return grown if self.cfg.window_sources is None else grown.last(self.cfg.window_sources)

    def write(self, state: State, carry: State, y: Tensor, ctx: Context) -> State:
        H, sources = carry["stream"], carry["sources"]
        y = y.to(H.dtype)
        if self.last:
            return {"stream": H + y}
        if self.cfg.form == "sublayer":
            return {"stream": H + y, "sources": self.pushed(sources, y)}
        if not self.sums:
            return {"stream": H + y, "sources": sources}
        partial = carry["partial"] + y if "partial" in carry else y
        if self.ends_group:
            return {"stream": H + y, "sources": self.pushed(sources, partial)}
        return {"stream": H + y, "sources": sources, "partial": partial}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return DeltaStream(cfg, layout)


class DeltaStream(NamedStream):
    """Opens with the embeddings as H and as the first source, closes with the final norm of H."""

    def open(self, x: Tensor, ctx: Context) -> State:
        sources = History.empty(self.layout)
        return {"stream": x, "sources": sources if self.cfg.released else sources.push(x, 0)}


DeltaAttnRes.Config.trace = DeltaTrace
