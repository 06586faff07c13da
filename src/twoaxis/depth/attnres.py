"""Attention Residuals: a sublayer reads a softmax mixture of earlier sublayer outputs instead of their sum.

READ(w, g; V) = sum_i a_i V_i,  a = softmax_i <w, g * rms(V_i)>                         (arXiv 2603.15031)
h_s = READ(w_s, g_s; b_0 .. b_{n-1}, p),   p' = p + f_s(norm(h_s)),   every G sublayers: b_n = p', p = 0

 b_0 ──┬───────────┬─────────── ...     b_0 = the embeddings; full form: G = 1, every output is a source
 b_1 ──┤           │
 p   ──┴─ READ ─ norm ─ f ─ + p ── p'   read-out: norm(READ(w, g; all sources))

Sources are branch outputs or their sums over a depth-block of G sublayers; there is no running stream. A read
may see a window of the newest sources, with the embeddings as a sink, and have heads (arXiv 2607.27230), keys
of low rank (2607.09694) or a query made from the newest source.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.attnres_read import Route
from twoaxis.depth.attnres_trace import AttnResTrace
from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State, Stream
from twoaxis.depth.history import History, source_specs
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import mix
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "attnres")
class AttnRes(Connection):
    """read: norm(softmax(w . rms(sources)) sources); write: push y, or add it to the open depth-block.

    state: {"sources": closed depth-blocks, "partial": the sum of the open one, if it has begun}. The first
    sublayer has one source and therefore no weights.
    """

    equation = "h_s = sum_i softmax_i(w_s . g_s rms(v_i)) v_i"
    source = "arXiv 2603.15031"

    class Config(DepthConfig):
        """Options of Attention Residuals.

        block_sublayers: G, the sublayers (not Transformer blocks) summed into one source; None is 1 (full).
        key_gain: a gain g on the key's norm (redundant with w in the function, not in the optimiser).
        key_norm_eps: of the key's norm.
        readout: "read" the sources once more at the end, as the paper does, or "sum" them.
        heads: slices of d with their own softmax; the key's norm is over the full d. query: "static", or made
        from the newest source. key_rank: keys are the last so many features, normed by themselves.
        window_sources: the newest sources that a read sees (the open depth-block counts), None is all; sink:
        the embeddings are seen beside them.
        scale_eps: the norm after a read of n sources takes eps / n^2, for h is n times smaller than the
        stream; then the model starts as the standard Transformer exactly. Public codes take eps as it is.
        """

        keeps_history = True
        block_sublayers: int | None = None
        key_gain: bool = True
        key_norm_eps: float = 1e-7
        readout: Literal["read", "sum"] = "read"
        scale_eps: bool = True
        heads: int = 1
        query: Literal["static", "input"] = "static"
        key_rank: int | None = None
        window_sources: int | None = None
        sink: bool = True

        def check(self) -> None:
            for name in ("heads", "key_rank", "window_sources"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise InputError(f"attnres({name}={value}): allowed is 1 or more")
            if self.heads > 1 and self.key_rank is not None:
                raise InputError("attnres: heads and key_rank both cut the keys; give one of them")
            if self.window_sources is not None and self.readout == "sum":
                raise InputError("attnres(readout='sum') needs every source; leave out window_sources")
            if not self.sink and self.window_sources is None:
                raise InputError("attnres(sink=False) is for a window; give window_sources too")
            if self.block_sublayers is not None and self.block_sublayers < 1:
                raise InputError(
                    f"attnres(block_sublayers={self.block_sublayers}): allowed is 1 or more, or None (full)"
                )
            if not 0 <= self.key_norm_eps < math.inf:
                raise InputError(
                    f"attnres(key_norm_eps={self.key_norm_eps}): allowed is a finite number of 0 or more"
                )

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"window_sources" if kind == "window" else "block_sublayers": count}

        @property
        def size(self) -> int:
            """Sublayers in a depth-block, G."""
            return self.block_sublayers or 1

        def n_sources(self, sublayer: int) -> int:
            """Sources before a sublayer (0-based, over the network): b_0, closed blocks, the open one."""
            return 1 + sublayer // self.size + (sublayer % self.size > 0)

        def seen(self, count: int) -> int:
            """How many of `count` sources a read sees."""
            return count if self.window_sources is None else min(count, self.window_sources + self.sink)

        def kept(self, n_closed: int, opened: bool) -> list[int]:
            """Which of the closed b_0, b_1, .. later reads see."""
            if self.window_sources is None:
                return list(range(n_closed))
            oldest = n_closed - self.window_sources + opened
            return [i for i in range(n_closed) if i >= oldest or (self.sink and i == 0)]

        def reads(self, layout: Layout) -> list[int]:
            """The number of sources of every read that has weights."""
            last = layout.n_sublayers + (self.readout == "read")
            return [n for n in (self.seen(self.n_sources(s)) for s in range(1, last)) if n > 1]

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            done = layout.sublayer(depth, 0)
            opened = done % self.size > 0
            closed = source_specs("sources", self.kept(done // self.size + 1, opened), tensor, layout)
            return {**closed, "partial": tensor} if opened else closed

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="branch" if self.size == 1 else "block sum",
                weights="QK, static Q" if self.query == "static" else "QK",
                normalizer="softmax",
                injection="replace",
                reads_per_block=2,
                short_swa=self._relation(),
            )

        def _relation(self) -> str:
            """The read as attention over a stack, see docs/methods/index.md."""
            says = {
                f"over {'branch outputs' if self.size == 1 else 'block sums and the open one'}": True,
                f"window = {self.window_sources}": self.window_sources is not None,
                "a sink": self.window_sources is not None and self.sink,
                f"{self.heads} heads": self.heads > 1,
                "a constant coordinate for q": self.query == "static",
                "normed keys": self.key_rank is None,
                f"keys of the last {self.key_rank} features, normed": self.key_rank is not None,
                "W_V = I": True,
            }
            return "extended: " + ", ".join(text for text, so in says.items() if so)

        def standard_start(self) -> StandardStart:
            if self.window_sources is not None:
                return "no"
            return "exact" if self.scale_eps else "up to eps"  # h_s is the stream / n, and a norm reads it

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Per token and read of n sources with keys of rank r (d): 4 n r + 2 n d flops (square sum, dot,
            mix), and 2 d r for a query made from a source. Twice that backward.
            """
            layout, reads, d = shape.layout, self.reads(shape.layout), shape.layout.d_model
            r, made = self.key_rank or d, self.query == "input"
            summed = self.n_sources(layout.n_sublayers) if self.readout == "sum" else 0
            adding = 2 * d * summed * (summed > 1) * shape.tokens  # weights of 1, which have no gradient
            reading = sum(reads) * (4 * r + 2 * d) + 2 * d * r * made * len(reads)
            parameters = len(reads) * r * ((d if made else 1) + self.key_gain)
            return self.network_cost(shape, parameters, reading) + Cost(
                flops_forward=adding, flops_backward=adding
            )

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        s = layout.sublayer(block, index)
        self.closed, within = divmod(s, cfg.size)
        self.opens, self.closes = within == 0, within == cfg.size - 1
        windowed = cfg.window_sources is not None
        kept = cfg.kept(self.closed + 1 + self.closes, not self.closes)
        self.kept = len(kept) if windowed else None  # of the closed depth-blocks; None is all
        self.drops_newest = cfg.window_sources == 1 < cfg.size  # closed, it is gone before the next closes
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.route = Route(cfg, layout) if cfg.seen(cfg.n_sources(s)) > 1 else None

    def mixture(self, state: State, norm: RMSNorm | None = None) -> Tensor:
        """h_s (B, T, d), what this sublayer reads before its norm; with `norm`, after it."""
        return _mixture(self.route, state, norm)

    def read(self, state: State, ctx: Context) -> tuple[Reads, None]:
        return Reads(self.mixture(state, self.norm)), None

    def write(self, state: State, carry: None, y: Tensor, ctx: Context) -> State:
        y = y.to(_sources(state)[0].dtype)
        partial = y if self.opens else state["partial"] + y
        sources: History = state["sources"]
        if self.closes:
            sources = sources.push(partial, self.closed + 1 if self.drops_newest else None)
        if self.kept is not None:  # by place: a block's own numbers would make torch compile each anew
            sources = sources.last(self.kept, sink=int(self.cfg.sink))
        return {"sources": sources} if self.closes else {"sources": sources, "partial": partial}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return AttnResStream(cfg, layout)


def _sources(state: State) -> tuple[Tensor, ...]:
    """Everything in the state, oldest first."""
    sources: tuple[Tensor, ...] = state["sources"].sources
    return (*sources, state["partial"]) if "partial" in state else sources


def _mixture(route: Route | None, state: State, norm: RMSNorm | None) -> Tensor:
    """The read of everything that is seen; without weights its sum (of one source, or the read-out)."""
    sources = _sources(state)
    if route is not None:
        return route(sources, norm)
    h = mix(sources, sources[0].new_ones(len(sources))) if len(sources) > 1 else sources[0]
    return h if norm is None else norm(h)


class AttnResStream(NamedStream):
    """Opens with the embeddings as the only source, closes with a last read (or sum) and the final norm."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(cfg, layout)
        seen = cfg.seen(cfg.n_sources(layout.n_sublayers))
        self.route = Route(cfg, layout) if cfg.readout == "read" and seen > 1 else None

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"sources": History.empty(self.layout).push(x, 0)}

    def mixture(self, state: State, norm: RMSNorm | None = None) -> Tensor:
        """The read-out (B, T, d) before the final norm; with `norm`, after it."""
        return _mixture(self.route, state, norm)

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.mixture(state, self.norm)


AttnRes.Config.trace = AttnResTrace
