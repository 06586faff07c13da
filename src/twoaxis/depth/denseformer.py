"""DenseFormer: after a block, the stream becomes a learned combination of all block outputs so far.

X_n = Block_n(Y_{n-1});  if p divides n: Y_n = sum_{j <= n, j = n mod k} alpha_{n,j} X_j,  else: Y_n = X_n
                                                                                        (arXiv 2402.02622)

 Y_{n-1} ── block n ── X_n ──┬── sum ── Y_n          a block is the standard one, its skips inside
 X_0 .. X_{n-1} ─────────────┴──┘                    X_0 = Y_0 = the embeddings

Sources are raw block outputs, whole streams; the mixed Y are never read again. With sources="period" only
every p-th block's output is one, and k counts over those: n = pm, S(n) = p {i <= m, i = m mod k}.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State, Stream
from twoaxis.depth.history import History, check_window, newest, source_specs
from twoaxis.depth.reader import Reader
from twoaxis.depth.trace import Trace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import mix, traced
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "denseformer")
class DenseFormer(Connection, Reader):
    """read: norm(x); write: x + y, and after a block x' = sum_j alpha_j X_j.

    state: {"stream": Y, "sources": the X_j that later mixes read}. alpha belongs to the block's last
    connection, starts one-hot on the newest source (the standard Transformer, exactly) and is not decayed.
    """

    equation = "Y_n = sum_{j = n mod k} alpha_nj X_j, X_n = Block_n(Y_{n-1})"
    source = "arXiv 2402.02622"
    weights = "alpha"

    class Config(DepthConfig):
        """Options of DenseFormer, k x p in the paper: 1x1 is the full model, 4x5 the recommended one.

        dilation: k, a mix sees every k-th block output, the newest included.
        period: p, a mix after every p-th block; blocks after the last multiple of p are plain.
        sources: "blocks" are the outputs of all blocks (the authors' package), "period" of those after which
        a mix stands, over which the dilation then counts (their training code). They agree at period 1.
        window_blocks: a mix sees those of the newest so many block outputs, its own included; None is all.
        """

        keeps_history = True
        dilation: int = 1
        period: int = 1
        sources: Literal["blocks", "period"] = "blocks"
        window_blocks: int | None = None

        def check(self) -> None:
            for name in ("dilation", "period"):
                if getattr(self, name) < 1:
                    raise InputError(f"denseformer({name}={getattr(self, name)}): allowed is 1 or more")
            check_window(self.name, "window_blocks", self.window_blocks)

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"window_blocks": count} if kind == "window" else {}

        @property
        def step(self) -> int:
            """The distance in blocks between two sources of a mix."""
            return self.dilation * (self.period if self.sources == "period" else 1)

        def mixed(self, n: int) -> range:
            """S(n): which block outputs Y_n is made of, oldest first; empty where Y_n = X_n."""
            if not n or n % self.period:
                return range(0)
            oldest = newest(n + 1, self.window_blocks)[0]
            return range(oldest + (n - oldest) % self.step, n + 1, self.step)

        def kept(self, n: int, n_blocks: int) -> list[int]:
            """The block outputs X_0 .. X_n that a mix after block n still reads."""
            last = min(n_blocks, n + self.dilation * self.period)  # the pattern of mixes repeats
            later = [m for m in range(n + 1, last + 1) if m % self.period == 0]
            seen = [self.mixed(m) for m in later]
            return [j for j in range(n + 1) if any(j in mix for mix in seen)]

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks: Y, and the block outputs still to be read."""
            return {
                "stream": tensor,
                **source_specs("sources", self.kept(depth, layout.n_blocks), tensor, layout),
            }

        @property
        def pushes(self) -> bool:
            return True

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="static",
                sharing="per mix",
                injection="replace",
                reads_per_block=1 / self.period,
                short_swa="no: weights belong to depth positions and nothing is compared",
            )

        def standard_start(self) -> StandardStart:
            return "exact"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """One weight per source of a mix; 2 |S(n)| d flops per token and mix, twice that backward."""
            layout = shape.layout
            weights = sum(len(self.mixed(n)) for n in range(1, layout.n_blocks + 1))
            return self.network_cost(shape, weights, 2 * weights * layout.d_model)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.closes = index == len(layout.blocks[block]) - 1
        self.mixed = tuple(cfg.mixed(block + 1))
        self.kept = frozenset(cfg.kept(block + 1, layout.n_blocks))
        one_hot = torch.zeros(len(self.mixed))
        one_hot[-1:] = 1
        self.alpha = nn.Parameter(one_hot) if self.closes and self.mixed else None
        self.number = None if self.alpha is None else block
        self.in_a_row = cfg.period == cfg.step == 1
        self.n_kept = len(self.kept)
        self.n_wanted = len(self.mixed) if self.in_a_row else None

    def known_weights(self) -> tuple[Tensor, bool] | None:
        """The parameter, and that it is no logits: see `ops/known_mix.py`."""
        return None if self.alpha is None else (self.alpha, False)

    def wants(self, index: int) -> bool:
        return index in self.mixed

    def weigh(self, sources: History) -> tuple[Tensor, ...]:
        assert self.alpha is not None
        alpha: Tensor = self.alpha
        if len(sources) != len(alpha):
            alpha = alpha[[self.mixed.index(j) for j in sources.index]]
        return (mix(sources.sources, alpha),)

    def read(self, state: State, ctx: Context) -> tuple[Reads, None]:
        return Reads(self.norm(state["stream"])), None

    def write(self, state: State, carry: None, y: Tensor, ctx: Context) -> State:
        x = state["stream"] + y.to(state["stream"].dtype)
        if not self.closes:
            return {**state, "stream": x}
        sources: History = state["sources"]
        number = None if self.in_a_row and len(sources) else self.block + 1
        outputs = sources.push(x, number)
        outputs = outputs.last(self.n_kept) if self.in_a_row else outputs.keep(self.kept.__contains__)
        if self.alpha is not None:
            (x,) = self.mixtures(sources.push(x, number, carried=True))
        return {"stream": x, "sources": outputs}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return DenseFormerStream(cfg, layout)


class DenseFormerStream(NamedStream):
    """Opens with the embeddings as X_0 = Y_0, closes with the final norm of Y_L."""

    def open(self, x: Tensor, ctx: Context) -> State:
        kept = self.cfg.kept(0, self.layout.n_blocks)
        return {"stream": x, "sources": History.empty(self.layout).push(x, 0).keep(kept.__contains__)}

    def loose(self, depth: int) -> frozenset[int]:
        return frozenset()


class DenseFormerTrace(Trace):
    """The same in sizes alone."""

    cfg: DenseFormer.Config

    def open(self, x: Array) -> State:
        kept = self.cfg.kept(0, self.layout.n_blocks)
        return {"stream": x, "sources": self.sources().push(x, 0).keep(kept.__contains__)}  # type: ignore[arg-type]

    def read(self, state: State, block: int, index: int) -> tuple[Any, Any]:
        return super().read(state["stream"], block, index)

    def write(self, state: State, carry: Any, y: Array, block: int, index: int) -> State:
        x = super().write(state["stream"], carry, y, block, index)
        if not self.closes(block, index):
            return {**state, "stream": x}
        sources, mixed = state["sources"], self.cfg.mixed(block + 1)
        outputs = sources.push(x, block + 1)
        if mixed:
            x = traced.mix(self.t, [*sources.keep(mixed.__contains__).sources, x], known=True)
        return {
            "stream": x,
            "sources": outputs.keep(self.cfg.kept(block + 1, self.layout.n_blocks).__contains__),
        }

    def close(self, state: State) -> Array:
        return super().close(state["stream"])


DenseFormer.Config.trace = DenseFormerTrace
