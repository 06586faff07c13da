"""Delta Attention Residuals: the ordinary stream stays, and a depth read is added to what a sublayer sees.

h_s = H_s + g READ(w_s; x_0, y_1 .. y_{s-1}),   H_{s+1} = H_s + f_s(norm(h_s))              (arXiv 2605.18855)
READ(w; V) = sum_i a_i V_i,  a = softmax_i <w, gain * rms(V_i)>

 x_0, y_1 .. y_{s-1} ── READ ── g ┐
 H_s ──┬───────────────────────── + ── norm ── f ──┐
       └───────────────────────────────────────────+── H_{s+1}      end: norm(H)

The read is not written to the stream. Block form: sources are x_0 and what finished depth-blocks have added.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, PlainStream, State, Stream
from twoaxis.depth.history import History, largest_boundary, source_specs
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import depth_read
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, StandardStart, TensorSpec


@spec.register("depth", "delta_attnres")
class DeltaAttnRes(Connection):
    """read: norm(H + g READ(sources)); write: H + y.

    state: {"stream": H, "sources": x_0 and sublayer outputs or depth-block sums, until the last read};
    in block form also {"partial": what the open depth-block has added}. Nothing of it is decayed. A read of
    one source has no weights, the network's first sublayer reads nothing (or its null source).
    """

    equation = "h_s = H_s + READ(w_s; x_0, y_1 .. y_{s-1}), H' = H + f(norm(h_s))"
    source = "arXiv 2605.18855"

    class Config(DepthConfig):
        """form: "sublayer" reads every sublayer output, "block" the sums over depth-blocks. source_blocks:
        the Transformer blocks in a depth-block. released: the block form as the public code runs it: a
        depth-block ends after its first sublayer's read, and its source is H minus the last source, not minus
        the last boundary's H, so that sources from the third on alternate. null_source: a learned vector
        (from 0) among the sources of each read. gate: g; "none" is 1, "scalar" sigmoid(c) and "vector"
        sigmoid(W H + c) with c from -2 and W from 0, "alpha" a scalar from 0. key_gain, key_norm_eps: of the
        key's norm.
        """

        keeps_history = True
        form: Literal["sublayer", "block"] = "sublayer"
        source_blocks: int = 3
        released: bool = False
        null_source: bool = False
        gate: Literal["none", "scalar", "vector", "alpha"] = "none"
        key_gain: bool = True
        key_norm_eps: float = 1e-7

        def check(self) -> None:
            if self.source_blocks < 1:
                raise InputError(f"delta_attnres(source_blocks={self.source_blocks}): allowed is 1 or more")
            if self.form == "sublayer" and (self.released or self.source_blocks != 3):
                raise InputError(
                    "delta_attnres(form='sublayer'): source_blocks and released are for form='block'"
                )
            if not (0 < self.key_norm_eps < math.inf or (self.key_norm_eps == 0 and not self.null_source)):
                raise InputError(
                    f"delta_attnres(key_norm_eps={self.key_norm_eps}): allowed is a finite number of 0 or "
                    "more, and above 0 with a null source"
                )

        def history_options(self, kind: str, count: int) -> dict[str, Any]:
            return {"form": "block", "source_blocks": count} if kind == "block_sums" else {}

        def n_sources(self, layout: Layout, block: int, index: int) -> int:
            """Sources of a sublayer's read, the null source not counted."""
            if self.form == "sublayer":
                s = layout.sublayer(block, index)
                return s + 1 if s else 0
            finished, within = divmod(block, self.source_blocks)
            if self.released:
                return finished + (1 if within or index else 0)
            return 0 if block == index == 0 else finished + 1

        def sums(self, layout: Layout, block: int) -> bool:
            """Whether the depth-block that `block` belongs to becomes a source of a later read."""
            last = (block // self.source_blocks + 1) * self.source_blocks
            return self.form == "block" and not self.released and last < layout.n_blocks

        def reads(self, layout: Layout) -> list[int]:
            """The sources of every sublayer's read, the null source counted."""
            places = ((b, i) for b, kinds in enumerate(layout.blocks) for i in range(len(kinds)))
            return [self.n_sources(layout, b, i) + self.null_source for b, i in places]

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks."""
            if depth == layout.n_blocks:
                return {"stream": tensor}
            if self.form == "sublayer":
                count = layout.sublayer(depth, 0) + 1
            elif self.released:
                count = -(-depth // self.source_blocks)
            else:
                count = depth // self.source_blocks + 1
            sources = source_specs("sources", range(count), tensor, layout)
            opened = depth % self.source_blocks and self.sums(layout, depth)
            return {"stream": tensor, **sources, **({"partial": tensor} if opened else {})}

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="branch" if self.form == "sublayer" else "block sum",
                weights="QK, static Q",
                normalizer="softmax",
                injection="add" if self.gate == "none" else "gated",
                reads_per_block=2,
                short_swa="extended: as attnres, added to the stream",
            )

        def standard_start(self) -> StandardStart:
            if self.gate == "alpha":
                return "exact"
            return "up to eps" if self.form == "sublayer" else "no"  # the mean of all outputs is H / n

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """6 n d flops per token and read of n sources, 2 d^2 for a vector gate; twice that backward."""
            layout, d = shape.layout, shape.layout.d_model
            reads = [n for n in self.reads(layout) if n]
            each = {"none": 0, "scalar": 1, "vector": d * d + d, "alpha": 1}[self.gate] + d * self.null_source
            weighed = sum(n > 1 for n in reads) * d * (2 if self.key_gain else 1)
            flops = 6 * sum(reads) * d + (2 * d * d * len(reads) if self.gate == "vector" else 0)
            tensor = TensorSpec((shape.batch_size, shape.seq_len, d), layout.state_dtype)
            largest = largest_boundary(lambda depth: self.state_spec(layout, depth, tensor), layout.n_blocks)
            return Cost(
                parameters=(layout.n_sublayers + 1) * d + weighed + each * len(reads),
                flops_forward=flops * shape.tokens,
                flops_backward=2 * flops * shape.tokens,
                boundary_bytes={"full": largest},
            )

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        count = cfg.n_sources(layout, block, index)
        self.route = DeltaRead(cfg, layout, count) if count or cfg.null_source else None
        self.sublayer = layout.sublayer(block, index)
        self.ends_block = index == len(layout.blocks[block]) - 1
        self.sums = cfg.sums(layout, block)
        self.grows = cfg.released and index == 0 and block % cfg.source_blocks == 0

    def mixture(self, state: State) -> Tensor:
        """h_s (B, T, d), what the sublayer reads before its norm."""
        H: Tensor = state["stream"]
        if self.route is None:
            return H
        return H + self.route(state["sources"].sources if self.sublayer else (), H)

    def read(self, state: State, ctx: Context) -> tuple[Reads, State]:
        reads = Reads(self.norm(self.mixture(state)))
        if self.grows:
            sources: History = state["sources"]
            new = state["stream"] if not len(sources) else state["stream"] - sources.sources[-1]
            state = {**state, "sources": sources.push(new, len(sources))}
        return reads, state

    def write(self, state: State, carry: State, y: Tensor, ctx: Context) -> State:
        H, sources = carry["stream"], carry["sources"]
        y = y.to(H.dtype)
        if self.sublayer == self.layout.n_sublayers - 1:
            return {"stream": H + y}
        if self.cfg.form == "sublayer":
            return {"stream": H + y, "sources": sources.push(y, self.sublayer + 1)}
        if not self.sums:
            return {"stream": H + y, "sources": sources}
        partial = carry["partial"] + y if "partial" in carry else y
        if self.ends_block and (self.block + 1) % self.cfg.source_blocks == 0:
            return {"stream": H + y, "sources": sources.push(partial, len(sources))}
        return {"stream": H + y, "sources": sources, "partial": partial}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return DeltaStream(cfg, layout)


class DeltaRead(nn.Module):
    """g READ(w, gain; null, sources). w (d,) starts at 0, the gain (d,) at 1, the null source (d,) at 0."""

    def __init__(self, cfg: Any, layout: Layout, n_sources: int) -> None:
        super().__init__()
        d, weighed = layout.d_model, n_sources + cfg.null_source > 1
        self.eps, self.gate = cfg.key_norm_eps, cfg.gate
        self.query = nn.Parameter(torch.zeros(d)) if weighed else None
        self.key_gain = nn.Parameter(torch.ones(d)) if weighed and cfg.key_gain else None
        self.null = nn.Parameter(torch.zeros(d)) if cfg.null_source else None
        self.gate_weight = nn.Parameter(torch.zeros(d, d)) if cfg.gate == "vector" else None
        start = {"none": None, "scalar": torch.tensor(-2.0), "vector": torch.full((d,), -2.0)}
        value = start.get(cfg.gate, torch.tensor(0.0))
        self.gate_bias = None if value is None else nn.Parameter(value)

    def forward(self, sources: tuple[Tensor, ...], H: Tensor) -> Tensor:
        """What is added to H (B, T, d)."""
        if self.null is not None:
            sources = (self.null.to(H.dtype).expand_as(H), *sources)
        if self.query is None:
            read = sources[0]
        else:
            read = depth_read(self.query, sources, key_gain=self.key_gain, key_norm_eps=self.eps)
        if self.gate_bias is None:
            return read
        dtype = compute_dtype(H)
        with full_precision(H):
            g = self.gate_bias.to(dtype)
            if self.gate_weight is not None:
                g = F.linear(H.to(dtype), self.gate_weight.to(dtype), g)
            g = g if self.gate == "alpha" else g.sigmoid()
            return (g * read).to(H.dtype)


class DeltaStream(PlainStream):
    """Opens with the embeddings as H and as the first source, closes with the final norm of H."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(layout)
        self.cfg = cfg

    def open(self, x: Tensor, ctx: Context) -> State:
        sources = History.empty(self.layout)
        return {"stream": x, "sources": sources if self.cfg.released else sources.push(x, 0)}

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(state["stream"])

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        return self.cfg.state_spec(self.layout, depth, self.spec_of(batch_size, seq_len))
