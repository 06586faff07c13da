"""Depth-Attention: before attention looks along the tokens, its query looks along depth and mixes the values.

V~_n = sum_{j in A_n} a_nj V~_j + a_nn V_n,   a_n = softmax over A_n and n of q_n . k_j / sqrt(D)   (arXiv 2606.05014)

 k_j, V~_j of anchors ──┐
 norm(x) ─ W_q, W_k, W_v ┴─ q_n . k_j ── V~_n ─┐          per token and key/value head; V~_0 = V_0
         └─ q_n, k_n ──────────────────────────┴─ attention ── + x

Anchors A_n are every stride-th attention before n. Sources are values that were mixed already, so depth is
read recursively. No parameter is new, and the cache keeps V~ in place of V.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, Core, DepthConfig, NamedStream, State, Stream
from twoaxis.depth.history import History, source_specs
from twoaxis.depth.inside import Heads, attentions_at, attentions_before, run_inside
from twoaxis.depth.trace import Trace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import depth_read, token_mix, traced
from twoaxis.ops.native.few_tokens import rows_read
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape, TensorSpec


@spec.register("depth", "depth_attention")
class DepthAttention(Connection):
    """read: norm(x); inside attention V becomes V~; write: x + y.

    state: {"stream": x, "sources": [k_j | V~_j] (B, T, heads, D_k + D_v) of the attentions that later ones
    read, numbered over the network}. Keys are unrotated: at one position a rotation changes no score.
    """

    equation = "V~_n = sum_j softmax_j(q_n k_j / sqrt(D)) V~_j, y = attention(q_n, k_n, V~_n)"
    source = "arXiv 2606.05014"

    class Config(DepthConfig):
        """stride_attentions: anchors are the attentions 0, s, 2s, ..; None is half their number (paper's size).
        recent_attentions: so many before the current one are read as well.
        """

        keeps_history = True
        stride_attentions: int | None = None
        recent_attentions: int = 0

        def check(self) -> None:
            if self.stride_attentions is not None and self.stride_attentions < 1:
                raise InputError(
                    f"depth_attention(stride_attentions={self.stride_attentions}): allowed is 1 or more, or "
                    "None for half the number of attentions"
                )
            if self.recent_attentions < 0:
                raise InputError(
                    f"depth_attention(recent_attentions={self.recent_attentions}): allowed is 0 or more"
                )

        def heads(self, layout: Layout) -> Heads:
            """The key/value heads of every attention; a model where they differ is refused."""
            found = attentions_before(layout, layout.n_blocks)
            if not found:
                raise InputError(
                    "depth_attention mixes the values of attention and no block has one; add 'attention'"
                )
            if len(set(found)) > 1:
                raise InputError(
                    "depth_attention needs keys and values of one shape and this model has (heads, key, value) "
                    f"{sorted(set(map(tuple, found)))}; give every attention the same n_heads and n_kv_heads"
                )
            return found[0]

        def anchors(self, layout: Layout, n: int) -> list[int]:
            """A_n: the earlier attentions that attention n reads."""
            stride = self.stride_attentions or max(1, len(attentions_before(layout, layout.n_blocks)) // 2)
            return [j for j in range(n) if j % stride == 0 or j >= n - self.recent_attentions]

        def kept(self, layout: Layout, done: int) -> list[int]:
            """Of the first `done` attentions those that a later one reads: all that the next one does."""
            last = len(attentions_before(layout, layout.n_blocks))
            return self.anchors(layout, done) if done < last else []

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks; `tensor` is like the stream."""
            heads = self.heads(layout)
            row = TensorSpec((*tensor.shape[:2], heads.heads, heads.key + heads.value), tensor.dtype)
            kept = self.kept(layout, len(attentions_before(layout, depth)))
            return {"stream": tensor, **source_specs("sources", kept, row, layout)}

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="keys and mixed values of earlier attentions",
                weights="QK",
                normalizer="softmax",
                sharing="per attention",
                injection="replace",
                reads_per_block=1,
                short_swa="extended: keys of each layer's own, values mixed recursively, anchors at a stride",
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """2 flops per key or value feature of each source, the own one included; twice that backward."""
            layout, heads = shape.layout, self.heads(shape.layout)
            count = len(attentions_before(layout, layout.n_blocks))
            sources = sum(len(a) + 1 for a in (self.anchors(layout, n) for n in range(count)) if a)
            return self.network_cost(shape, 0, 2 * sources * heads.heads * (heads.key + heads.value))

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.first = len(attentions_before(layout, block, index))  # this sublayer's first attention
        end = self.first + len(attentions_at(layout, block, index))
        self.anchors = {n: frozenset(cfg.anchors(layout, n)) for n in range(self.first, end)}
        self.kept = frozenset(cfg.kept(layout, end))
        self.key_width = cfg.heads(layout).key

    def forward(self, state: State, core: Core, ctx: Context) -> State:
        reads, _ = self.read(state, ctx)
        n, sources = self.first, state["sources"]

        def between(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            nonlocal n, sources
            assert v is not None
            anchors = sources.keep(self.anchors[n].__contains__).sources
            row = torch.cat((k, v), -1).to(state["stream"].dtype)
            if anchors:
                mixed = self.mixed_values(q, (*anchors, row))
                row, v = torch.cat((row[..., : self.key_width], mixed), -1), mixed.to(q.dtype)
            sources, n = sources.push(row, n), n + 1
            return q, k, v

        y = run_inside(core, reads, ctx, between)  # type: ignore[arg-type]
        return self.write(state, sources, y, ctx)

    def mixed_values(self, q: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
        """V~ (B, T, heads, D_v) from queries (B, T, H, D_k) and rows [k | V], the own one last.

        Query heads that share a key are averaged first, so that the values keep their number of heads.
        """
        keys, values = zip(*(row.split((self.key_width, row.shape[-1] - self.key_width), -1) for row in rows))
        scale = self.key_width**-0.5
        if (
            q.shape[2] == rows[-1].shape[2]
            and (found := rows_read(q, rows, self.key_width, scale)) is not None
        ):
            return found
        query = q.to(rows[-1].dtype).unflatten(2, (rows[-1].shape[2], -1)).mean(3)
        _, weights = depth_read(query, keys, key_norm_eps=None, scale=scale, return_weights=True)
        (mixed,) = token_mix(values, weights.unsqueeze(-2))
        return mixed

    def read(self, state: State, ctx: Context) -> tuple[Reads, History]:
        return Reads(self.norm(state["stream"])), state["sources"]

    def write(self, state: State, carry: History, y: Tensor, ctx: Context) -> State:
        x = state["stream"] + y.to(state["stream"].dtype)
        return {"stream": x, "sources": carry.keep(self.kept.__contains__)}

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return DepthAttentionStream(cfg, layout)


class DepthAttentionStream(NamedStream):
    """Opens with the embeddings and no source, closes with the final norm of the stream."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(cfg, layout)
        cfg.heads(layout)

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"stream": x, "sources": History.empty(self.layout)}


class DepthAttentionTrace(Trace):
    """The same in sizes alone."""

    cfg: DepthAttention.Config

    def open(self, x: Array) -> State:
        return {"stream": x, "sources": self.sources()}

    def sublayer(self, state: State, core: Any, block: int, index: int) -> State:
        reads, _ = self.read(state["stream"], block, index)
        n, sources = len(attentions_before(self.layout, block, index)), state["sources"]

        def between(q: Array, k: Array, v: Array | None) -> tuple[Array, Array, Array]:
            nonlocal n, sources
            assert v is not None
            with self.t.of("depth"):
                anchors = sources.keep(self.cfg.anchors(self.layout, n).__contains__).sources
                row = self.t.state(self.t.run("cat", (k, v), self.t.array(k.width + v.width)))
                if anchors:
                    mixed = self.mixed_values((*anchors, row), k.width, v.width)
                    row = self.t.run("cat", (row, mixed), self.t.like(row))
                    v = self.t.cast(mixed, q.itemsize)
            sources, n = sources.push(row, n), n + 1
            return q, k, v

        x = self.write(state["stream"], None, core(reads, between), block, index)
        done = len(attentions_before(self.layout, block, index + 1))
        return {"stream": x, "sources": sources.keep(self.cfg.kept(self.layout, done).__contains__)}

    def mixed_values(self, rows: tuple[Array, ...], key: int, value: int) -> Array:
        """V~, tokens and heads being the rows of the read."""
        t, heads = self.t, self.cfg.heads(self.layout).heads
        query = t.run("mean", (), t.array(key, rows[-1].itemsize))
        keys = [per_head(row.view(key), heads) for row in rows]
        weights = traced.depth_read(t, query, keys, normed=False, weights_only=True)
        (mixed,) = traced.token_mix(t, [row.view(value) for row in rows], weights)
        return mixed

    def close(self, state: State) -> Array:
        return super().close(state["stream"])


def per_head(x: Array, heads: int) -> Array:
    """A view whose rows are a token's heads."""
    return Array(x.numbers, x.width // heads, x.itemsize, x)


DepthAttention.Config.trace = DepthAttentionTrace
