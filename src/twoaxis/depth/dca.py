"""DeepCrossAttention: a block's queries, keys and values each read their own mixture of all earlier branches.

GRN(G) = sum_i (b_i + relu(<w, h_i>)) * h_i        b_i (d,) from 1, w (d,) from 0           (arXiv 2502.06785)
A = Attn(norm_q(GRN_q), norm_k(GRN_k), norm_v(GRN_v)),   h_n = A + F(norm(A + GRN_q)),   end: norm(GRN(G))

 h_0 ───────┬─ GRN_q ──┬─ norm_q ─┐
 h_1 ───────┼─ GRN_k ──│─ norm_k ─┼─ Attn ─┬─────────── + ── h_n
 h_{n-1} ───┴─ GRN_v ──│─ norm_v ─┘        + ─ norm ─ F ┘
                       └───────────────────┘

Sources are branches: h_n is what block n adds and holds no skip. At b = 1, w = 0: the standard Transformer.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State, Stream, qkv_index
from twoaxis.depth.dca_state import push, sources_of
from twoaxis.depth.dca_trace import DCATrace
from twoaxis.depth.grn import GRN
from twoaxis.depth.history import History, source_specs
from twoaxis.depth.reader import Reader
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "dca")
class DCA(Connection, Reader):
    """read: norm(GRN_q + the block's branches so far), k and v alike; write: add to the block's branch.

    state between blocks: see `dca_state`; inside a block also the query's read and the branch so far. Depth
    weights never decay.
    """

    equation = "h_n = A + F(norm(A + g_q)), A = Attn(g_q, g_k, g_v), g = sum_i (b_i + relu(w . h_i)) * h_i"
    source = "arXiv 2502.06785"
    weights = "grn"

    class Config(DepthConfig):
        """k: None reads every branch, else at most k + 2 sources: the embeddings, the middle branches as
        one, the last k. middle: "sum" them (the paper), or "drop" them and read the first k and the last k
        (the public code; not the standard Transformer at first once a block has more than 2k sources). grn:
        "v3" gates, "v2" has one static weight per feature, "v1" one per source. gate_norm: score rms(h_i)
        with a learned gain (the public code)."""

        keeps_history = True
        k: int | None = None
        middle: Literal["sum", "drop"] = "sum"
        grn: Literal["v1", "v2", "v3"] = "v3"
        gate_norm: bool = False

        def check(self) -> None:
            if self.k is not None and self.k < 1:
                raise InputError(f"dca(k={self.k}): allowed is 1 or more last branches, or None for all")
            if self.k is None and self.middle == "drop":
                raise InputError(
                    "dca(middle='drop') drops what k leaves out; give k, as in dca(k=2, middle='drop')"
                )
            if self.gate_norm and self.grn != "v3":
                raise InputError(f"dca(gate_norm=True): grn={self.grn!r} has no gate; use grn='v3'")

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"k": count} if kind == "window" else {}

        def single(self, count: int) -> list[int]:
            """Of the branches h_0 .. h_{count-1}, those that are sources by themselves."""
            left = self.leaving(count)
            return [i for i in range(count) if i not in left]

        def leaving(self, held: int, pooled: bool = False) -> range:
            """The places, of `held` sources, that are sources no longer; pooled: there is a sum of some already."""
            if self.k is None:
                return range(held, held)
            first = self.k if self.middle == "drop" else 1 if pooled or held > self.k + 2 else 2
            return range(first, max(first, held - self.k))

        def pooled(self, count: int) -> int:
            """j of the source h_1 + .. + h_j; 0 when nothing is pooled."""
            left = count - len(self.single(count))
            return left if self.middle == "sum" else 0

        def n_sources(self, count: int) -> int:
            """How many sources stand for `count` branches."""
            return len(self.single(count)) + (self.pooled(count) > 0)

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks, each tensor like `tensor`."""
            specs = source_specs("sources", self.single(depth + 1), tensor, layout)
            pooled = self.pooled(depth + 1)
            return {**specs, f"middle.{pooled}": tensor} if pooled else specs

        @property
        def pushes(self) -> bool:
            return self.k is None

        def coordinates(self) -> Coordinates:
            gated = self.grn == "v3"
            return Coordinates(
                source="branch"
                if self.k is None or self.middle == "drop"
                else "branch, and a sum of branches",
                weights="gated" if gated else "static",
                normalizer="none",
                sharing="per block and input",
                injection="replace",
                reads_per_block=3,
                short_swa="no: a source is weighed by itself, without query and softmax"
                if gated
                else "no: weights belong to depth positions and nothing is compared",
            )

        def standard_start(self) -> StandardStart:
            return "no" if self.middle == "drop" else "exact"  # "drop" is exact up to 2k sources

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Per token and read of n sources 2 n d flops for b, and for v3 4 n d more for score and gate."""
            layout = shape.layout
            d, blocks = layout.d_model, layout.n_blocks
            for index in range(blocks):
                qkv_index(layout, index, self.name)  # a block without one is refused
            reads = [(3, self.n_sources(n)) for n in range(1, blocks + 1)] + [(1, self.n_sources(blocks + 1))]
            weights = sum(outputs * n for outputs, n in reads) * (1 if self.grn == "v1" else d)
            gates = sum(outputs for outputs, _ in reads) * d if self.grn == "v3" else 0
            gains = len(reads) * d if self.gate_norm else 0
            norms = 2 * blocks * d  # of keys and values
            flops = (6 if self.grn == "v3" else 2) * sum(o * n for o, n in reads) * d
            return self.network_cost(shape, weights + gates + gains + norms, flops)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.takes_qkv = index == qkv_index(layout, block, self.method_name)
        self.closes = index == len(layout.blocks[block]) - 1
        self.grn = GRN(cfg, layout, cfg.n_sources(block + 1), reads=3) if index == 0 else None
        self.number = block if index == 0 and cfg.k is None else None
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.key_norm = RMSNorm(layout.d_model, layout.norm_eps) if self.takes_qkv else None
        self.value_norm = RMSNorm(layout.d_model, layout.norm_eps) if self.takes_qkv else None

    def weigh(self, sources: History) -> tuple[Tensor, ...]:
        assert self.grn is not None
        return self.grn(sources)

    def read(self, state: State, ctx: Context) -> tuple[Reads, State]:
        if (found := self.step(state)) is not None:
            return found
        if self.grn is not None:
            query, key, value = self.mixtures(sources_of(state))
            state = {**state, "query": query, "key": key, "value": value}
        norms = {"query": self.norm, "key": self.key_norm, "value": self.value_norm}
        so_far = state.get("branch")
        inputs = {
            name: norm(state[name] if so_far is None else state[name] + so_far)
            for name, norm in norms.items()
            if norm is not None
        }
        if self.takes_qkv:
            state = {name: t for name, t in state.items() if name not in ("key", "value")}
        return Reads(inputs["query"], inputs.get("key"), inputs.get("value")), state

    def step(self, state: State) -> tuple[Reads, State] | None:
        """The read where it is one call, norms included."""
        if self.grn is None:
            return None
        found = self.grn.step(sources_of(state), (self.norm, self.key_norm, self.value_norm))
        if found is None:
            return None
        (query, key, value), normed = found
        if self.takes_qkv:
            return Reads(*normed), {**state, "query": query}
        return Reads(normed[0]), {**state, "query": query, "key": key, "value": value}

    def write(self, state: State, carry: State, y: Tensor, ctx: Context) -> State:
        so_far = carry.get("branch")
        y = y.to(carry["query"].dtype)
        branch = y if so_far is None else so_far + y
        if self.closes:
            number = None if len(carry["sources"]) else self.block + 1  # all are summed
            return push(self.cfg, carry, branch, number)
        return {**carry, "branch": branch}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return DCAStream(cfg, layout)


class DCAStream(NamedStream, Reader):
    """Opens with the embeddings as h_0, closes with one more GRN and the final norm."""

    weights = "grn"

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.grn = GRN(cfg, layout, cfg.n_sources(layout.n_blocks + 1), reads=1)
        self.number = layout.n_blocks if cfg.k is None else None

    def weigh(self, sources: History) -> tuple[Tensor, ...]:
        return self.grn(sources)

    def loose(self, depth: int) -> frozenset[int] | None:
        return None if self.number is None else frozenset()

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"sources": History.empty(self.layout).push(x, 0)}

    def mixture(self, state: State) -> Tensor:
        """The read-out (B, T, d) before the final norm."""
        (mixture,) = self.mixtures(sources_of(state))
        return mixture

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(self.mixture(state))


DCA.Config.trace = DCATrace
