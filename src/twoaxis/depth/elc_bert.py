"""ELC-BERT: a block reads a learned convex combination of all earlier branches, and keeps no skip.

x_n = sum_{i<n} alpha_ni h_i,  alpha_n = softmax(a_n),   h_n = A(x_n) + F(x_n + A(x_n))     (arXiv 2311.02265)

 h_0 ───────┬─ sum ─ x_n ─┬─ norm ─ A ─┬─────────── + ── h_n      end: norm(h_L), or of one more sum
 h_{n-1} ───┘             └─────────── + ─ norm ─ F ┘

Sources are branches: h_n is what block n adds. Unit weights and a summed read-out: the standard Transformer.
"""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State, Stream
from twoaxis.depth.history import History, check_window, newest, source_specs
from twoaxis.depth.static_mix import MixReader, Normalize, StaticMix, n_weights, static_mix_trace
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec

BRANCH_EPS = 1e-7  # of the parameter-free LayerNorm on a branch


@spec.register("depth", "elc_bert")
class ELCBert(Connection, MixReader):
    """read: norm(x_n + the block's branch so far); write: add to the branch, which becomes the source h_n.

    state between blocks: {"sources": h_0 .. h_n}, after the last block only what the read-out needs; inside a
    block also {"input": x_n, "branch"}. a_n belongs to the block's first connection and is not decayed.
    """

    equation = "x_n = sum_i softmax(a_n)_i h_i, h_n = A(x_n) + F(x_n + A(x_n))"
    source = "arXiv 2311.02265"

    class Config(DepthConfig):
        """variant: which of the four published files. "zero": logits start at 0. "weighted_output": so, and
        the read-out is one more combination of h_0 .. h_L; in the others it is h_L alone. "normalized": as
        zero, h_n goes through a LayerNorm without parameters. "base": logits start at 0 but for a 1 at the
        newest source, and later sublayers read the branch without x_n. normalize: "softmax", or "none" for
        free weights, which start at 1; then "weighted_output" starts as the standard Transformer.
        window_blocks: a combination sees so many newest branches, None all.
        """

        keeps_history = True
        variant: Literal["zero", "base", "normalized", "weighted_output"] = "zero"
        normalize: Normalize = "softmax"
        window_blocks: int | None = None

        def check(self) -> None:
            check_window(self.name, "window_blocks", self.window_blocks)

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"window_blocks": count} if kind == "window" else {}

        def kept(self, depth: int, n_blocks: int) -> range:
            """The branches that the read after `depth` blocks sees, or the final norm."""
            last = depth == n_blocks and self.variant != "weighted_output"
            return newest(depth + 1, 1 if last else self.window_blocks)

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            last = depth == layout.n_blocks and self.variant != "weighted_output"
            return source_specs("sources", self.kept(depth, layout.n_blocks), tensor, layout, carried=last)

        @property
        def pushes(self) -> bool:
            return True

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="branch",
                weights="static",
                normalizer=self.normalize,
                sharing="per block",
                injection="replace",
                reads_per_block=1,
                short_swa="no: weights belong to depth positions and nothing is compared",
            )

        def standard_start(self) -> StandardStart:
            free = (self.variant, self.normalize, self.window_blocks) == ("weighted_output", "none", None)
            return "exact" if free else "no"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """One weight per source of a mix; 2 n d flops per token and mix of n sources, twice backward."""
            layout = shape.layout
            mixes = list(range(1, layout.n_blocks + 1 + (self.variant == "weighted_output")))
            weights = [n_weights(len(newest(n, self.window_blocks)), self.normalize) for n in mixes]
            return self.network_cost(shape, sum(weights), 2 * sum(weights) * layout.d_model)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.closes = index == len(layout.blocks[block]) - 1
        self.ends = block == layout.n_blocks - 1 and cfg.variant != "weighted_output"
        first = index == 0
        self.seen = cfg.kept(block, layout.n_blocks)
        self.kept = len(cfg.kept(block + 1, layout.n_blocks))
        self.mix = StaticMix(self.seen, cfg.normalize, newest=cfg.variant == "base") if first else None
        self.number = block if first else None
        self.n_wanted = len(self.seen)

    def read(self, state: State, ctx: Context) -> tuple[Reads, State]:
        if self.mix is not None:
            state = {**state, "input": self.mixtures(state["sources"])[0]}
        if "branch" not in state:
            x = state["input"]
        elif self.cfg.variant == "base":
            x = state["branch"]
        else:
            x = state["input"] + state["branch"]
        return Reads(self.norm(x)), state

    def write(self, state: State, carry: State, y: Tensor, ctx: Context) -> State:
        y = y.to(carry["input"].dtype)
        branch = carry["branch"] + y if "branch" in carry else y
        if not self.closes:
            return {**carry, "branch": branch}
        if self.cfg.variant == "normalized":
            branch = F.layer_norm(branch, branch.shape[-1:], eps=BRANCH_EPS)
        sources: History = carry["sources"]
        sources = sources.push(branch, None if len(sources) else self.block + 1, carried=self.ends)
        return {"sources": sources.last(self.kept)}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return ELCStream(cfg, layout)


class ELCStream(NamedStream, MixReader):
    """Opens with the embeddings as h_0, closes with the final norm of h_L or of a last combination."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(cfg, layout)
        weighted = cfg.variant == "weighted_output"
        self.seen = cfg.kept(layout.n_blocks, layout.n_blocks)
        self.mix = StaticMix(self.seen, cfg.normalize) if weighted else None
        self.number = layout.n_blocks if weighted else None

    def loose(self, depth: int) -> frozenset[int]:
        ends = depth == self.layout.n_blocks and self.mix is None
        return frozenset([depth] if ends else [])

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"sources": History.empty(self.layout).push(x, 0)}

    def readout(self, state: State) -> Tensor:
        """What the final norm reads (B, T, d)."""
        sources: History = state["sources"]
        return sources.sources[-1] if self.mix is None else self.mixtures(sources)[0]

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(self.readout(state))


class ELCTrace(Trace):
    """The same in sizes alone."""

    cfg: ELCBert.Config

    def open(self, x: Array) -> State:
        return {"sources": self.sources().push(x, 0)}  # type: ignore[arg-type]

    def read(self, state: State, block: int, index: int) -> tuple[Any, State]:
        if index == 0:
            x = static_mix_trace(self.t, state["sources"].sources, self.cfg.normalize)
            state = {**state, "input": x}
        branch = [state["branch"]] if "branch" in state else []
        read = branch if branch and self.cfg.variant == "base" else [state["input"], *branch]
        return super().read(self.t.add(*read), block, index)[0], state

    def write(self, state: State, carry: State, y: Array, block: int, index: int) -> State:
        branch = self.t.add(*([carry["branch"]] if "branch" in carry else []), self.t.state(y))
        if not self.closes(block, index):
            return {**carry, "branch": branch}
        if self.cfg.variant == "normalized":
            branch = self.t.layer_norm(branch)
        kept = self.cfg.kept(block + 1, self.layout.n_blocks)
        ends = block == self.layout.n_blocks - 1 and self.cfg.variant != "weighted_output"
        return {"sources": carry["sources"].push(branch, block + 1, carried=ends).last(len(kept))}

    def close(self, state: State) -> Array:
        sources = state["sources"].sources
        weighted = self.cfg.variant == "weighted_output"
        x = static_mix_trace(self.t, sources, self.cfg.normalize) if weighted else sources[-1]
        return super().close(x)


ELCBert.Config.trace = ELCTrace
