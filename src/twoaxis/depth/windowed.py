"""What methods with a depth window share: block states kept as far back as a later read sees, one read a block."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from twoaxis.depth.block_states import StatesConfig, StatesConnection, StatesStream
from twoaxis.depth.connection import Connection, State, Stream
from twoaxis.depth.window_read import WindowRead
from twoaxis.depth.window_rule import Logits, States, narrowed
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops.native.window_step import window_read
from twoaxis.ops.reference_steps import Chooser
from twoaxis.types import Context, Cost, Layout, Reads, Shape, StandardStart


class WindowedConfig(StatesConfig):
    """Options of a read over the last block states.

    window_blocks: K, the block states read, the current one included; None reads all.
    shared: one W_Q, W_K, W_V for all blocks, as in the paper, or one set per block.
    injection: the block's input from the state h and z, "add" h + z, "replace" z alone, or "gated"
    h + sigmoid(w . rms(h) + b) z.
    output: a projection W_O after the read.
    heads: of width d / heads, each with a softmax of its own.
    position: what tells layers apart, "none" (paper), "rope" a rotation by their distance, or "bias" a
    learned number for each head and distance.
    """

    follows_rule: ClassVar[bool] = True

    window_blocks: int | None = None
    shared: bool = True
    injection: Literal["add", "replace", "gated"] = "add"
    output: bool = False
    heads: int = 1
    position: Literal["none", "rope", "bias"] = "none"

    def check(self) -> None:
        if self.window_blocks is not None and self.window_blocks < 1:
            raise InputError(
                f"{self.name}(window_blocks={self.window_blocks}): allowed is 1 or more (the current "
                "state counts), or None for all"
            )
        if self.heads < 1:
            raise InputError(f"{self.name}(heads={self.heads}): allowed is 1 or more")
        if self.window_blocks == 1 and (self.heads, self.position) != (1, "none"):
            raise InputError(
                f"{self.name}(window_blocks=1): one state has weight 1; leave out heads and position"
            )

    def history_options(self, kind: str, count: int) -> dict[str, Any]:
        return {"window_blocks": count} if kind == "window" else {}

    def head_width(self, layout: Layout) -> int:
        """D = d / heads; InputError for a width that does not fit."""
        d, D = layout.d_model, layout.d_model // self.heads
        if d % self.heads or (self.position == "rope" and D % 2):
            even = " of even width, for the rotation" if self.position == "rope" else ""
            raise InputError(f"{self.name}(heads={self.heads}): d_model={d} is not cut into such heads{even}")
        return D

    @property
    def reach(self) -> int | None:
        """The most states that a read can see, None if all."""
        return self.window_blocks

    def n_sources(self, depth: int) -> int:
        """The states seen by the read after `depth` blocks, min(K, l + 1)."""
        return depth + 1 if self.reach is None else min(self.reach, depth + 1)

    def standard_start(self) -> StandardStart:
        return "no" if self.injection == "replace" and self.window_blocks != 1 else "exact"

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """Per token and read of n states: 2 d^2 flops for each of W_Q, W_K, W_V, W_O (W_K n times with
        "rope"), 2 n d for the mix of each head, and as much for its scores (with "rope" for those of all
        heads, whose keys are d / heads wide); a read of one state is W_V (and W_O) alone. A gate is 2 d.
        Twice that backward.
        """
        layout, d = shape.layout, shape.layout.d_model
        self.head_width(layout)
        counts = [self.n_sources(depth) for depth in range(layout.n_blocks)]
        flops = sum(self.read_flops(n, d) for n in counts)
        return self.network_cost(shape, self.read_parameters(counts, d), flops)

    def read_parameters(self, counts: list[int], d: int) -> int:
        """Numbers of the reads of so many states, in a network of width d."""
        owners = counts[-1:] if self.shared else counts
        matrices = sum((3 if n > 1 else 1) + self.output for n in owners)
        biases = sum(self.heads * n for n in owners if n > 1) if self.position == "bias" else 0
        gates = len(owners) * (d + 1) if self.injection == "gated" else 0
        return matrices * d * d + biases + gates

    def read_flops(self, n: int, d: int) -> int:
        """Of one token's read of n states."""
        gate = 2 * d if self.injection == "gated" else 0
        if n == 1:
            return 2 * d * d * (1 + self.output) + gate
        keys = n if self.position == "rope" else 1
        scored = 1 if self.position == "rope" else self.heads  # heads of absorbed queries are d wide
        return 2 * d * d * (2 + keys + self.output) + 2 * n * d * (scored + self.heads) + gate


class Windowed(StatesConnection):
    """read: norm(x = h and z(h(l-K+1) .. h(l))) at a block's first sublayer, else norm(x); write: x + y.

    state: {"sources": the block states that the next read sees, h(l) the newest}; inside a block also
    {"stream": x}.
    """

    window_read: WindowRead | None

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: WindowRead | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.window = cfg.n_sources(block)  # of the read before this block
        if self.opens:
            self.attach("window_read", shared, lambda: WindowRead(cfg, layout, self.window))
        else:
            self.window_read = None

    def visible(self, state: State, ctx: Context) -> tuple[States, Logits]:
        """The states that the read before this block sees under the context's rule."""
        return narrowed(state["sources"].last(self.window).sources, self.block, ctx, self.cfg.reach)

    def read_depth(self, state: State, ctx: Context | None = None) -> Tensor:
        """W_O z_l (B, T, d), from the state before this block."""
        assert self.window_read is not None
        ctx = ctx or Context()
        return self.window_read(*self.visible(state, ctx), ctx.cache)

    def step(
        self, state: State, ctx: Context, chooser: Chooser | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """x, norm(x) and the share with the chooser's part by one kernel, in a step of decoding; None: by `read`."""
        assert self.window_read is not None
        prepared = None if ctx.depth_window is not None else self.window_read.prepared(ctx.cache)
        if prepared is None:
            return None
        gate = self.window_read.gate
        found = window_read(
            state["sources"].sources[-self.window :],
            prepared,
            injection=self.cfg.injection,
            gate=None if gate is None else (gate.weight, gate.bias),
            chooser=chooser,
            share=state.get("share"),
            norm=self.norm,
        )
        return found  # type: ignore[return-value]

    def read(self, state: State, ctx: Context) -> tuple[Reads, Any]:
        if self.opens:
            assert self.window_read is not None
            if (found := self.step(state, ctx)) is not None:
                return Reads(found[1]), found[0]
            x = self.window_read.inject(state["sources"].sources[-1], self.read_depth(state, ctx))
        else:
            x = state["stream"]
        return Reads(self.norm(x)), x

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        widest = cfg.n_sources(layout.n_blocks - 1)
        shared = WindowRead(cfg, layout, widest) if cfg.shared else None
        blocks = cls.every(cfg, layout, shared)
        return cls.ends(cfg, layout, shared), blocks

    @classmethod
    def ends(cls, cfg: Any, layout: Layout, shared: WindowRead | None) -> Stream:
        """The stream that owns the shared projections."""
        return WindowedStream(cfg, layout, shared)


class WindowedStream(StatesStream):
    """Opens with the embeddings as h(0), closes with the final norm of h(L); owns shared projections."""

    def __init__(self, cfg: Any, layout: Layout, shared: WindowRead | None) -> None:
        super().__init__(cfg, layout)
        self.window_read = shared
