"""The dynamic form of LIMe: a sublayer reads a mix of the streams before every sublayer so far.

x_v = sum_m gate(W rms(x) + c)_{v,m} H_m,   v = 1 or q, k, v       gate: softmax over m, or relu

As in lucidrains/x-transformers; how close it is to the paper's own dynamic form was not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth.connection import Connection, State
from twoaxis.depth.history import History
from twoaxis.depth.trace import Trace
from twoaxis.norm import RMSNorm
from twoaxis.ops import token_mix, traced
from twoaxis.ops.native.few_tokens import folds, made
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.tape import Array
from twoaxis.types import Context, Layout, Reads


class HiddenMix(nn.Module):
    """`views` mixes of n streams, weighted by the current one. W and c start uniform in +-1/sqrt(d)."""

    def __init__(self, layout: Layout, n_sources: int, views: int, gate: str) -> None:
        super().__init__()
        self.views, self.gate = views, gate
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.score = nn.Linear(layout.d_model, views * n_sources)

    def step(
        self, x: Tensor, streams: tuple[Tensor, ...], norms: Sequence[nn.Module | None]
    ) -> tuple[Tensor, ...] | None:
        """The mixes, normed, in one call in a step of decoding; None: by `forward`."""
        norm, score = self.norm, self.score
        if not folds(norm):
            return None
        found = made(
            streams,
            x,
            score.weight,
            score.bias,
            eps=norm.eps,
            gain=norm.weight,
            finish=self.gate,
            norms=norms,
        )
        return None if found is None else found[1]

    def forward(self, x: Tensor, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`views` tensors (B, T, d) from the current stream and n streams, oldest first."""
        with full_precision(x):
            h = self.norm(x.to(compute_dtype(x)))
            scores = F.linear(h, self.score.weight.to(h.dtype), self.score.bias.to(h.dtype))
            scores = scores.unflatten(-1, (self.views, -1))  # (B, T, views, n)
            weights = scores.softmax(-1) if self.gate == "softmax" else scores.relu()
        return token_mix(streams, weights)


class DynamicLIMe(Connection):
    """read: norm(mix of streams), one or three views; write: x + y, the skip unmixed.

    state: {"stream": x, "sources": the streams before every sublayer so far, until the last has read}.
    """

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.sublayer = layout.sublayer(block, index)
        self.views = cfg.n_views(layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        self.key_norm = RMSNorm(layout.d_model, layout.norm_eps) if self.views == 3 else None
        self.value_norm = RMSNorm(layout.d_model, layout.norm_eps) if self.views == 3 else None
        self.mix = HiddenMix(layout, self.sublayer + 1, self.views, cfg.gate) if self.sublayer else None

    def read(self, state: State, ctx: Context) -> tuple[Reads, History]:
        x = state["stream"]
        sources: History = state["sources"].push(x, self.sublayer)
        if self.mix is not None:
            norms = [self.norm, self.key_norm, self.value_norm][: self.views]
            found = self.mix.step(x, (*state["sources"].sources, x), norms)
            if found is not None:
                return Reads(*found), sources
        inputs = (x,) * self.views if self.mix is None else self.mix(x, (*state["sources"].sources, x))
        if self.key_norm is None or self.value_norm is None:
            return Reads(self.norm(inputs[0])), sources
        query, key, value = inputs
        return Reads(self.norm(query), self.key_norm(key), self.value_norm(value)), sources

    def write(self, state: State, carry: History, y: Tensor, ctx: Context) -> State:
        x = state["stream"] + y.to(state["stream"].dtype)
        last = self.sublayer == self.layout.n_sublayers - 1
        return {"stream": x, "sources": carry.last(0) if last else carry}


class DynamicTrace(Trace):
    """The same in sizes alone."""

    cfg: Any

    def open(self, x: Array) -> State:
        return {"stream": x, "sources": self.sources()}

    def read(self, state: State, block: int, index: int) -> tuple[Any, History]:
        t, x, s = self.t, state["stream"], self.layout.sublayer(block, index)
        views, sources = self.cfg.n_views(self.layout, block, index), state["sources"].push(x, s)
        inputs = [x] * views
        if s:
            scores = t.linear(t.norm(t.cast(x, t.wide)), views * (s + 1), bias=True)
            weights = t.map(self.cfg.gate, scores, keep="output")
            seen = [*state["sources"].sources, x]
            inputs = traced.token_mix(t, seen, weights, views)
        return Reads(*[t.norm(u) for u in inputs]), sources  # type: ignore[arg-type]

    def write(self, state: State, carry: History, y: Array, block: int, index: int) -> State:
        x = super().write(state["stream"], None, y, block, index)
        last = self.layout.sublayer(block, index) == self.layout.n_sublayers - 1
        return {"stream": x, "sources": History() if last else carry}

    def close(self, state: State) -> Array:
        return super().close(state["stream"])
