"""The two-axis hybrid: a gate between what a block reads along the sequence and what it reads along depth.

s = rms(SWA_w(norm(x))) before its W_o,   z = rms(depth read over the last K states),   both (B, T, d)
G = sigmoid(W_g [s; z] + b_g),   y = x + gamma W_o (G s + (1 - G) z)                  a sketch, corrected

 norm(x) ── W_q, W_k, W_v ── window ── rms ─ s ─┐
    x ──┬───────── read over depth ─── rms ─ z ─┴─ G ── W_o ── gamma ─┐
        └────────────────────────────────────────────────────────────+── y

The gate stands in the first attention of each block. Other sublayers are plain: x + f(norm(x)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.axis_gate import AxisGate
from twoaxis.depth.block_states import StatesConnection
from twoaxis.depth.connection import Connection, Core, State, Stream
from twoaxis.depth.hybrid_config import HybridConfig
from twoaxis.depth.hybrid_trace import HybridTrace
from twoaxis.depth.window_read import WindowRead
from twoaxis.depth.window_rule import States, narrowed
from twoaxis.depth.windowed import WindowedStream
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import rms
from twoaxis.ops.native.few_tokens import unwatched
from twoaxis.ops.native.gates_step import axis_gate
from twoaxis.ops.native.window_step import window_read
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.sequence import SoftmaxAttention
from twoaxis.types import Context, Layout, Reads


@spec.register("depth", "hybrid")
class Hybrid(StatesConnection):
    """read: norm(x); in a block's first attention, before its W_o, the gate mixes in z; write: x + gamma y, or x + y.

    state: {"sources": the block states that later reads see, the newest the stream}; inside a block also
    {"stream": x}. The depth read of a block sees its last K states, x itself the newest of them.
    """

    equation = "y = x + gamma W_o (G rms(SWA(norm x)) + (1 - G) rms(z)), G = sigmoid(W_g [s; z] + b_g)"
    source = "arXiv 2603.16039 and ours"

    class Config(HybridConfig):
        """The options of `HybridConfig`."""

    window_read: WindowRead | None

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: WindowRead | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index)
        place, heads = cfg.place(layout, block)
        self.window = cfg.read().n_sources(block)
        self.letter = cfg.letter(block) if index == place else None
        self.norm = None if self.letter == "D" else RMSNorm(layout.d_model, layout.norm_eps)
        self.gate = (
            AxisGate(layout.d_model, cfg.gate_width(heads, layout.d_model)) if self.letter == "B" else None
        )
        self.gamma = nn.Parameter(torch.tensor(float(cfg.start == "normal"))) if self.letter else None
        if self.letter in ("B", "D"):
            self.attach("window_read", shared, lambda: WindowRead(cfg.read(), layout, self.window))
        else:
            self.window_read = None

    def forward(self, state: State, core: Core, ctx: Context) -> State:
        if self.gamma is None:
            return super().forward(state, core, ctx)
        if not isinstance(core, SoftmaxAttention):
            raise InputError(
                f"hybrid mixes before an attention's W_o and {type(core).__name__} is none of twoaxis's"
            )
        x = self.stream_of(state)
        heads = self.mixed(state, core, ctx)
        for layer in core.output_layers():  # W_o reads its own dtype
            heads = heads.to(layer.weight.dtype)
        y = core.finish(heads).to(x.dtype)
        return self.write(state, x, self.gamma.to(x.dtype) * y, ctx)

    def mixed(self, state: State, core: SoftmaxAttention, ctx: Context) -> Tensor:
        """G s + (1 - G) z (B, T, d), or the one of the two that there is."""
        if self.letter == "S":
            return self.read_tokens(state, core, ctx)
        if self.letter == "D":
            return self.read_depth(state, ctx)
        assert self.gate is not None
        s, silent = self.gather(state, core, ctx), unwatched(self.gate)  # `axis_shares` watches
        gate = self.gate.weight, self.gate.bias
        if silent and (mixture := self.step(state, ctx, injection="axes", gate=gate, s=s)) is not None:
            return mixture
        z = self.depth(state, ctx)
        if silent:
            found = axis_gate(s, z, self.gate.weight, self.gate.bias, self.layout.norm_eps)
            if found is not None:
                return found
        s, z = self.normed(s), self.normed(z)
        with full_precision(s):
            G = self.gate(s, z)  # (B, T, gates), each for its share of the channels
            s, z = (x.unflatten(-1, (G.shape[-1], -1)) for x in (s, z))
            return torch.lerp(z, s, G[..., None]).flatten(-2)  # exactly s at G = 1, exactly z at G = 0

    def read_tokens(self, state: State, core: SoftmaxAttention, ctx: Context) -> Tensor:
        """s (B, T, d): what the attention hands to W_o, normed."""
        return self.normed(self.gather(state, core, ctx))

    def gather(self, state: State, core: SoftmaxAttention, ctx: Context) -> Tensor:
        """The same before its norm."""
        q, k, v = core.project(self.read(state, ctx)[0], ctx)
        assert v is not None
        return core.gather(q, k, v, ctx)

    def read_depth(self, state: State, ctx: Context | None = None) -> Tensor:
        """z (B, T, d): the read of the last block states, the stream the newest of them, normed."""
        return self.normed(self.depth(state, ctx or Context()))

    def depth(self, state: State, ctx: Context) -> Tensor:
        """The same before its norm."""
        assert self.window_read is not None
        z = self.step(state, ctx, injection="replace")
        if z is not None:
            return z
        seen = narrowed(self.window_of(state), self.block, ctx, self.cfg.window_blocks)
        return self.window_read(*seen, ctx.cache)

    def window_of(self, state: State) -> States:
        """The last block states, the stream the newest."""
        return (*state["sources"].sources[-self.window : -1], self.stream_of(state))

    def step(self, state: State, ctx: Context, **options: Any) -> Tensor | None:
        """What is read, or what the gate makes of it, by one kernel in a step of decoding; None: plainly."""
        assert self.window_read is not None
        prepared = None if ctx.depth_window is not None else self.window_read.prepared(ctx.cache)
        found = None if prepared is None else window_read(self.window_of(state), prepared, **options)
        return None if found is None else found[0]

    def normed(self, x: Tensor) -> Tensor:
        """rms(x) in at least float32."""
        return rms(x.to(compute_dtype(x)), self.layout.norm_eps)

    def stream_of(self, state: State) -> Tensor:
        """x (B, T, d), what the sublayer is added to."""
        x: Tensor = state["sources"].sources[-1] if self.opens else state["stream"]
        return x

    def read(self, state: State, ctx: Context) -> tuple[Reads, Tensor]:
        x = self.stream_of(state)
        return Reads(x if self.norm is None else self.norm(x)), x

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        readers = cfg.readers(layout)
        shared = None
        if cfg.shared and readers:
            shared = WindowRead(cfg.read(), layout, cfg.read().n_sources(readers[-1]))
        blocks = cls.every(cfg, layout, shared)
        return WindowedStream(cfg, layout, shared), blocks


Hybrid.Config.trace = HybridTrace
