"""Vertical Attention, static form: a block reads a softmax combination of normed earlier block outputs.

x_n = sum_{i<n} softmax(a_n)_i norm0(h_i),   h_n = Block_n(x_n)      reconstructed from the public reviews
                                                                      of OpenReview A6uabXKiXc
 norm0(h_0) .. norm0(h_{n-1}) ── sum ── x_n ── block n ── h_n         end: norm(h_L)

Neither the paper's text nor code could be read; docs/methods/vertical_attention.md states what is inferred.
The query/key form that arXiv 2603.16039 describes is `depth_window`.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State, Stream
from twoaxis.depth.history import History, check_window, newest, source_specs
from twoaxis.depth.static_mix import MixReader, StaticMix, n_weights, static_mix_trace
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.ops import rms
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, TensorSpec


@spec.register("depth", "vertical_attention")
class VerticalAttention(Connection, MixReader):
    """read: norm(x_n + the branch so far), x_n a mix of normed block outputs; write: add to the branch.

    state: {"sources": norm0(h_0) .. norm0(h_n), normed once when a block ends}, after the last block
    {"output": h_L}; inside a block also {"input": x_n, "branch": what its sublayers have added}.
    """

    equation = "x_n = sum_i softmax(a_n)_i norm0(h_i), h_n = Block_n(x_n)"
    source = "OpenReview A6uabXKiXc (reviews)"

    class Config(DepthConfig):
        """block_residual: h_n is a whole block's output, x_n included; False: only what the block adds, as in
        ELC-BERT. source_norm: "rms" divides h by its root mean square, "length" by its length, "none" not.
        window_blocks: a read sees so many newest sources, None all.
        """

        keeps_history = True
        block_residual: bool = True
        source_norm: Literal["rms", "length", "none"] = "rms"
        window_blocks: int | None = None

        def check(self) -> None:
            check_window(self.name, "window_blocks", self.window_blocks)

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"window_blocks": count} if kind == "window" else {}

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            if depth == layout.n_blocks:
                return {"output": tensor}
            return source_specs("sources", newest(depth + 1, self.window_blocks), tensor, layout)

        @property
        def pushes(self) -> bool:
            return True

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="block output" if self.block_residual else "branch",
                weights="static",
                normalizer="softmax",
                sharing="per block",
                injection="replace",
                reads_per_block=1,
                short_swa="no: weights belong to depth positions and nothing is compared",
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Per token 2 n d flops for a mix of n sources, twice backward."""
            layout = shape.layout
            counts = [len(newest(n, self.window_blocks)) for n in range(1, layout.n_blocks + 1)]
            weights = sum(n_weights(n, "softmax") for n in counts)
            return self.network_cost(shape, weights, 2 * weights * layout.d_model)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.closes = index == len(layout.blocks[block]) - 1
        self.ends = block == layout.n_blocks - 1
        self.seen = newest(block + 1, cfg.window_blocks)
        self.mix = StaticMix(self.seen, "softmax") if index == 0 else None
        self.kept = len(newest(block + 2, cfg.window_blocks))
        self.number = block if index == 0 else None
        self.n_wanted = len(self.seen)

    def read(self, state: State, ctx: Context) -> tuple[Reads, State]:
        if self.mix is not None:
            state = {**state, "input": self.mixtures(state["sources"])[0]}
        x = state["input"] + state["branch"] if "branch" in state else state["input"]
        return Reads(self.norm(x)), state

    def write(self, state: State, carry: State, y: Tensor, ctx: Context) -> State:
        y = y.to(carry["input"].dtype)
        branch = carry["branch"] + y if "branch" in carry else y
        if not self.closes:
            return {**carry, "branch": branch}
        h = carry["input"] + branch if self.cfg.block_residual else branch
        if self.ends:
            return {"output": h}
        sources: History = carry["sources"]
        sources = sources.push(norm0(h, self.cfg, self.layout), None if len(sources) else self.block + 1)
        return {"sources": sources.last(self.kept)}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return VerticalStream(cfg, layout)


def norm0(h: Tensor, cfg: Any, layout: Layout) -> Tensor:
    """A source as it is read: h / sqrt(mean(h^2) + eps), that divided by sqrt(d), or h."""
    if cfg.source_norm == "none":
        return h
    normed = rms(h, layout.norm_eps)
    return normed if cfg.source_norm == "rms" else normed * h.shape[-1] ** -0.5


class VerticalStream(NamedStream):
    """Opens with the normed embeddings as the first source, closes with the final norm of h_L."""

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"sources": History.empty(self.layout).push(norm0(x, self.cfg, self.layout), 0)}

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(state["output"])

    def loose(self, depth: int) -> frozenset[int]:
        return frozenset()


class VerticalTrace(Trace):
    """The same in sizes alone."""

    cfg: VerticalAttention.Config

    def normed(self, h: Array) -> Array:
        """norm0(h)."""
        if self.cfg.source_norm == "none":
            return h
        y = self.t.norm(h, gain=False)
        return y if self.cfg.source_norm == "rms" else self.t.map("scale", y, keep="nothing")

    def open(self, x: Array) -> State:
        return {"sources": self.sources().push(self.normed(x), 0)}  # type: ignore[arg-type]

    def read(self, state: State, block: int, index: int) -> tuple[Any, State]:
        if index == 0:
            state = {**state, "input": static_mix_trace(self.t, state["sources"].sources, "softmax")}
        parts = [state[name] for name in ("input", "branch") if name in state]
        return super().read(self.t.add(*parts), block, index)[0], state

    def write(self, state: State, carry: State, y: Array, block: int, index: int) -> State:
        branch = self.t.add(*([carry["branch"]] if "branch" in carry else []), self.t.state(y))
        if not self.closes(block, index):
            return {**carry, "branch": branch}
        h = self.t.add(carry["input"], branch) if self.cfg.block_residual else branch
        if block == self.layout.n_blocks - 1:
            return {"output": h}
        kept = len(newest(block + 2, self.cfg.window_blocks))
        return {"sources": carry["sources"].push(self.normed(h), block + 1).last(kept)}

    def close(self, state: State) -> Array:
        return super().close(state["output"])


VerticalAttention.Config.trace = VerticalTrace
