"""LIMe: attention reads keys and values mixed from those of all layers so far; queries and residual stay.

[K'|V']_n,h = sum_{m<=n, g} R_n[h, (m, g)] [K|V]_m,g,   then rotation and attention as usual   (2502.09245)

 [K|V]_0 .. [K|V]_{n-1} ──┐                  R_n: (heads, heads of all layers so far), free and static
 norm(x) ── W_kv ─ [K|V]_n ┴─ R_n ─ K', V' ─┐
         └─ W_q ─────────────────────────── q ── attention ── + x

K and V share R. They are mixed before rotation (after a query-key norm); the cache keeps K', V'.
The dynamic form, which mixes hidden states instead, is in `lime_dynamic.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, Core, DepthConfig, NamedStream, State, Stream, qkv_index
from twoaxis.depth.history import History, source_specs
from twoaxis.depth.inside import attentions_at, attentions_before, run_inside
from twoaxis.depth.lime_dynamic import DynamicLIMe
from twoaxis.depth.lime_trace import lime_trace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import head_mix, head_rows
from twoaxis.types import (
    Context,
    Coordinates,
    Cost,
    Layout,
    ParamRule,
    Reads,
    Shape,
    StandardStart,
    TensorSpec,
)


@spec.register("depth", "lime")
class LIMe(Connection):
    """read: norm(x); inside attention K, V become K', V'; write: x + y.

    state: {"stream": x, "sources": as long as a later attention reads them}; source m is [K|V] of the m-th
    attention of the network, (B, T, 2 D, heads). Routers are not decayed and learn ten times faster than the
    rest, as in the public code. kind="dynamic" is built of `DynamicLIMe`.
    """

    equation = "[K'|V']_n = R_n [[K|V]_0; ..; [K|V]_n], y = attention(q_n, K', V')"
    source = "arXiv 2502.09245"

    class Config(DepthConfig):
        """kind: "static" routes raw keys and values of all attentions so far; "dynamic" mixes the streams
        before every sublayer so far by weights made from the current one. start, of static routers: "paper"
        has this layer's heads as they are plus random amounts of older ones, "standard" no older ones. views,
        of the dynamic form: 1 mix per sublayer, or 3, for q, k, v, in a block's first sublayer that takes
        them. gate: of its weights.
        """

        keeps_history = True
        kind: Literal["static", "dynamic"] = "static"
        start: Literal["paper", "standard"] = "paper"
        views: Literal[1, 3] = 1
        gate: Literal["softmax", "relu"] = "softmax"

        def check(self) -> None:
            if self.kind == "static" and (self.views != 1 or self.gate != "softmax"):
                raise InputError("lime(kind='static'): views and gate are for kind='dynamic'; leave them out")
            if self.kind == "dynamic" and self.start != "paper":
                raise InputError(
                    "lime(kind='dynamic', start='standard'): allowed is 'paper'; it has no such start"
                )

        def n_views(self, layout: Layout, block: int, index: int) -> int:
            """Mixes of a dynamic sublayer."""
            wide = self.views == 3 and index == qkv_index(layout, block, "lime(views=3)")
            return 3 if wide else 1

        def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
            """The state after `depth` blocks; `tensor` is like the stream."""
            if self.kind == "dynamic":
                before = range(layout.sublayer(depth, 0)) if depth < layout.n_blocks else range(0)
                return {"stream": tensor, **source_specs("sources", before, tensor, layout)}
            heads = attentions_before(layout, depth)
            if len(heads) == len(attentions_before(layout, layout.n_blocks)):
                heads = []
            rows: dict[str, TensorSpec] = {}
            for m, (h, key, value) in enumerate(heads):
                row = TensorSpec((*tensor.shape[:2], key + value, h), tensor.dtype)
                rows |= source_specs("sources", [m], row, layout)
            return {"stream": tensor, **rows}

        def coordinates(self) -> Coordinates:
            static = self.kind == "static"
            return Coordinates(
                source="raw keys and values" if static else "stream",
                weights="static" if static else "gated",
                normalizer="none" if static else self.gate.replace("relu", "none"),
                sharing="per attention" if static else "per sublayer",
                injection="replace",
                reads_per_block=1 if static else 2,
                short_swa="no: weights belong to depth positions and nothing is compared",
            )

        def standard_start(self) -> StandardStart:
            return "exact" if self.start == "standard" else "no"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Static: 2 flops per weight, feature of [K|V] and token. Dynamic: 2 d for each of the
            weights of a token, and as many to mix. Twice that backward.
            """
            layout, d = shape.layout, shape.layout.d_model
            places = [(b, i) for b in range(layout.n_blocks) for i in range(len(layout.blocks[b]))]
            numbers = flops = 0
            if self.kind == "dynamic":
                for s, (b, i) in enumerate(places, start=1):
                    views, reads = self.n_views(layout, b, i), s > 1
                    numbers += (views - 1) * d + reads * (d + views * s * (d + 1))  # first: norms of k, v
                    flops += 4 * views * s * d * reads
            else:
                for n, h, older, width in routers(layout):
                    numbers += h * (older + h) if n else 0
                    flops += 2 * h * (older + h) * width if n else 0
            return self.network_cost(shape, numbers, flops)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        every = routers(layout)
        self.first = len(
            attentions_before(layout, block, index)
        )  # the number of this sublayer's first attention
        self.after = self.first + len(attentions_at(layout, block, index))
        self.ends = self.after == len(every)
        self.routers = nn.ModuleDict(
            {str(n): Router(cfg, heads, older) for n, heads, older, _ in every[self.first : self.after] if n}
        )

    def forward(self, state: State, core: Core, ctx: Context) -> State:
        reads, sources = self.read(state, ctx)
        n = self.first

        def between(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            nonlocal sources, n
            assert v is not None
            own = head_rows(*(x.to(state["stream"].dtype) for x in (k, v)))
            if n:
                rows, widths = (*sources.sources, own), (k.shape[-1], v.shape[-1])
                k, v = (x.to(q.dtype) for x in self.routers[str(n)](rows, widths))
            sources, n = sources.push(own, n), n + 1
            return q, k, v

        y = run_inside(core, reads, ctx, between)  # type: ignore[arg-type]
        return self.write(state, sources, y, ctx)

    def read(self, state: State, ctx: Context) -> tuple[Reads, History]:
        return Reads(self.norm(state["stream"])), state["sources"]

    def write(self, state: State, carry: History, y: Tensor, ctx: Context) -> State:
        x = state["stream"] + y.to(state["stream"].dtype)
        return {"stream": x, "sources": carry.last(0) if self.ends else carry}

    def param_rule(self, name: str) -> ParamRule:
        return ParamRule(decay=False, lr_scale=10.0 if name.startswith("routers") else 1.0)

    @classmethod
    def for_block(cls, cfg: Any, layout: Layout, block: int) -> list[Connection]:
        made: type[Connection] = DynamicLIMe if cfg.kind == "dynamic" else cls
        return [made(cfg, layout, block, index) for index in range(len(layout.blocks[block]))]

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return LIMeStream(cfg, layout)


def routers(layout: Layout) -> list[tuple[int, int, int, int]]:
    """(n, its heads, all older heads, width of [K|V]) of every attention; widths that differ are refused."""
    found = attentions_before(layout, layout.n_blocks)
    if not found:
        raise InputError("lime mixes the keys and values of attention and no block has one; add 'attention'")
    widths = sorted({(key, value) for _, key, value in found})
    if len(widths) > 1:
        raise InputError(
            f"lime mixes heads of one width and this model has (key, value) {widths}; give every attention "
            "the same n_heads"
        )
    older = [sum(a.heads for a in found[:n]) for n in range(len(found))]
    return [(n, a.heads, older[n], a.key + a.value) for n, a in enumerate(found)]


class Router(nn.Module):
    """R (heads, older + heads): K' and V' (B, T, heads, D) from the rows of all layers, this one's last.

    Starts at the identity for this layer's heads, and for older ones uniform in +-sqrt(3 / (older + heads)),
    or at zero.
    """

    def __init__(self, cfg: Any, heads: int, older: int) -> None:
        super().__init__()
        reach = (3 / (older + heads)) ** 0.5 if cfg.start == "paper" else 0.0
        self.weight = nn.Parameter(
            torch.cat((torch.empty(heads, older).uniform_(-1, 1) * reach, torch.eye(heads)), 1)
        )

    def forward(self, rows: tuple[Tensor, ...], widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """(B, T, heads, width) for each width, from each layer's (B, T, 2 D, its heads), oldest first."""
        return head_mix(rows, self.weight, widths)


class LIMeStream(NamedStream):
    """Opens with the embeddings and no source, closes with the final norm of the stream."""

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"stream": x, "sources": History.empty(self.layout)}


LIMe.Config.trace = staticmethod(lime_trace)
