"""Depth window: the duality paper's explicit read, attention over the last K block states.

z_l = softmax(q K^T / sqrt(d_k)) V,  q = W_Q h(l),  K = W W_K,  V = W W_V,
W = [h(max(0, l-K+1)) .. h(l)], the current state included                                 (arXiv 2603.16039)

 h(l-K+1) .. h(l-1) ──┐
 h(l) ──┬───── read z_l ── W_O ──┐        one read per block, before its first sublayer;
        └────────────────────────+── block l+1 ── h(l+1)

The paper leaves the injection open: here z is added to the block's input, skip included, and nothing is read
after the last block, whose state goes to the final norm.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, State, Stream
from twoaxis.depth.history import History, largest_boundary, source_specs
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import depth_read, mix
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "depth_window")
class DepthWindow(Connection):
    """read: norm(h + W_O z(h(l-K+1) .. h(l))) at a block's first sublayer, else norm(x); write: x + y.

    state: {"sources": the block states that the next read sees, h(l) the newest}; inside a block also
    {"stream": x}.
    """

    equation = "x = h(l) + softmax(W_Q h(l) (W W_K)^T / sqrt(d)) W W_V, W the last K block states"
    source = "arXiv 2603.16039"

    class Config(DepthConfig):
        """Options of the depth window.

        window_blocks: K, the block states read, the current one included; None reads all.
        shared: one W_Q, W_K, W_V for all blocks, as in the paper, or one set per block.
        injection: what becomes of z; "add" adds it to the block's input.
        output: a projection W_O after the read.
        """

        window_blocks: int | None = None
        shared: bool = True
        injection: Literal["add"] = "add"
        output: bool = False

        def check(self) -> None:
            if self.window_blocks is not None and self.window_blocks < 1:
                raise InputError(
                    f"depth_window(window_blocks={self.window_blocks}): allowed is 1 or more (the current "
                    "state counts), or None for all"
                )

        def n_sources(self, depth: int) -> int:
            """K_l = min(K, l + 1), the states seen by the read after `depth` blocks."""
            return depth + 1 if self.window_blocks is None else min(self.window_blocks, depth + 1)

        def kept(self, depth: int, n_blocks: int) -> int:
            """How many states the next read needs; after the last block, that block's own."""
            return self.n_sources(depth) if depth < n_blocks else 1

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            oldest = depth + 1 - self.kept(depth, layout.n_blocks)
            return source_specs("sources", range(oldest, depth + 1), tensor)

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="QK",
                normalizer="softmax",
                sharing="network" if self.shared else "per block",
                injection=self.injection,
                reads_per_block=1,
                short_swa=f"yes: window = {self.window_blocks or 'l + 1'} over depth",
            )

        def standard_start(self) -> StandardStart:
            return "exact"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Per token and read of n states: 2 d^2 flops for each of W_Q, W_K, W_V, W_O, and 4 n d for
            scores and mix; a read of one state is W_V (and W_O) alone. Twice that backward.
            """
            layout, d = shape.layout, shape.layout.d_model
            counts = [self.n_sources(depth) for depth in range(layout.n_blocks)]
            matrices = [(3 if n > 1 else 1) + self.output for n in counts]
            flops = shape.tokens * sum(
                2 * d * d * m + (4 * n * d if n > 1 else 0) for m, n in zip(matrices, counts, strict=True)
            )
            tensor = TensorSpec((shape.batch_size, shape.seq_len, d), layout.state_dtype)
            largest = largest_boundary(lambda depth: self.state_spec(layout, depth, tensor), layout.n_blocks)
            owned = max(matrices) if self.shared else sum(matrices)
            return Cost(
                parameters=(layout.n_sublayers + 1) * d + owned * d * d,
                flops_forward=flops,
                flops_backward=2 * flops,
                boundary_bytes={"full": largest},
            )

    window_read: WindowRead | None

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: WindowRead | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.opens, self.closes = index == 0, index == len(layout.blocks[block]) - 1
        self.window = cfg.n_sources(block)  # of the read before this block
        self.kept = cfg.kept(block + 1, layout.n_blocks)
        if not self.opens:
            self.window_read = None
        elif not cfg.shared:
            self.window_read = WindowRead(cfg, layout, self.window)
        elif shared is not None:
            self.__dict__["window_read"] = shared  # the stream registers it, once
        else:
            raise InputError(
                "depth_window(shared=True) is built for the whole network; use DepthWindow.network"
            )

    def read_depth(self, state: State) -> Tensor:
        """W_O z_l (B, T, d), from the state before this block."""
        assert self.window_read is not None
        return self.window_read(state["sources"].last(self.window).sources)

    def read(self, state: State, ctx: Context) -> tuple[Reads, Tensor]:
        if self.opens:
            h = state["sources"].sources[-1]
            x = h + self.read_depth(state).to(h.dtype)
        else:
            x = state["stream"]
        return Reads(self.norm(x)), x

    def write(self, state: State, carry: Tensor, y: Tensor, ctx: Context) -> State:
        x, sources = carry + y.to(carry.dtype), state["sources"]
        if self.closes:
            return {"sources": sources.push(x, self.block + 1).last(self.kept)}
        return {"sources": sources, "stream": x}

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        widest = cfg.n_sources(layout.n_blocks - 1)
        shared = WindowRead(cfg, layout, widest) if cfg.shared else None
        blocks: list[list[Connection]] = [
            [cls(cfg, layout, block, index, shared) for index in range(len(kinds))]
            for block, kinds in enumerate(layout.blocks)
        ]
        return DepthWindowStream(cfg, layout, shared), blocks


class WindowRead(nn.Module):
    """z and its projections, d x d, bias-free.

    Over one state softmax is 1, so a read that never sees more has no W_Q and W_K. W_V starts at zero, so
    that the model starts as the standard Transformer; the others start as N(0, init_std^2).

    `forward` absorbs the projections: it scores the raw states with W_K^T W_Q h and applies W_V once, after
    mixing. `attend` takes keys and values that were projected once per state and kept over depth, like a
    decoding cache. Both need three d x d products per read; the first keeps one tensor per state, not two,
    so the network uses it.
    """

    def __init__(self, cfg: Any, layout: Layout, n_sources: int) -> None:
        super().__init__()
        d = layout.d_model
        self.scale = d**-0.5

        self.query = Projection(d, layout.init_std) if n_sources > 1 else None
        self.key = Projection(d, layout.init_std) if n_sources > 1 else None
        self.value = Projection(d, 0.0)
        self.output = Projection(d, layout.init_std) if cfg.output else nn.Identity()

    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        """W_O z (B, T, d) from the states of a window, oldest first, the current one last."""
        mixed = states[-1]
        if len(states) > 1:
            assert self.query is not None
            assert self.key is not None
            query = F.linear(self.query(states[-1]), self.key.weight.mT)
            mixed = depth_read(query, states, key_norm_eps=None, scale=self.scale)
        return self.output(self.value(mixed))

    def project(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A state's key and value (B, T, d), to be kept over depth."""
        assert self.key is not None
        return self.key(state), self.value(state)

    def attend(self, state: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
        """W_O z (B, T, d) from the current state and the window's keys and values: equals `forward`."""
        assert self.query is not None
        query = self.query(state)
        _, weights = depth_read(query, keys, key_norm_eps=None, scale=self.scale, return_weights=True)
        return self.output(mix(values, weights.unbind(-1)))


class Projection(nn.Linear):
    """A d x d matrix that takes states of any dtype."""

    def __init__(self, d: int, std: float) -> None:
        super().__init__(d, d, bias=False)
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class DepthWindowStream(Stream):
    """Opens with the embeddings as h(0), closes with the final norm of h(L); owns shared projections."""

    def __init__(self, cfg: Any, layout: Layout, shared: WindowRead | None) -> None:
        super().__init__(layout)
        self.cfg = cfg
        self.window_read = shared

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"sources": History().push(x, 0)}

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(state["sources"].sources[-1])

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        return self.cfg.state_spec(self.layout, depth, self.spec_of(batch_size, seq_len))
