"""Deep Delta Learning: a sublayer's output is a direction along which the state is rewritten, not a summand.

X' = X + beta k (v^T - k^T X),   k = h / sqrt(|h|^2 + eps^2),   h = f(c),   c = norm(u)    (arXiv 2601.00417)
beta = 2 sigmoid(g(c)) in (0, 2);   v = 4 sigmoid(W_v u + b_v) in the code,   v = W_v c in the paper

 X ──┬── compress ── u ──┬── norm ── c ── f ── k          m = 1: the state is (B, T, d) and u = X
     │                   └── v     └── beta  │
     └── k^T X, compared with v, written ────┴── X'

The shortcut I - beta k k^T has eigenvalue 1 - beta along k and 1 elsewhere: it never expands the state.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, DepthConfig, State, Stream
from twoaxis.depth.ddl_compress import Compressor, DDLStream, new_compressor, new_memory, step
from twoaxis.depth.ddl_trace import DDLTrace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import delta_rewrite
from twoaxis.ops.precision import cast, compute_dtype, full_precision
from twoaxis.types import DTYPES, Context, Coordinates, Cost, Layout, Reads, Shape, TensorSpec


@spec.register("depth", "ddl")
class DDL(Connection):
    """read: c = norm(compress(X)); write: X + beta(c) k (v^T - k^T X), k = unit(y).

    state: (B, T, d), or (B, T, d, m) with value_dim m > 1. One compressor per block: the block's first
    connection owns it, the others only refer to it. Start as in the public code: all matrices N(0, 0.25 / d),
    b_v uniform in +-1/sqrt(d), beta0 from its bias; never the standard Transformer. Nothing is decayed: the
    paper names one global weight decay and no grouping. Gate, target and rewrite run in at least float32.
    """

    equation = "X' = X + beta k (v^T - k^T X), k = unit(f(norm(u)))"
    source = "arXiv 2601.00417"

    class Config(DepthConfig):
        """By default the form of the public code; value_dim=4 is its recommended model (CC+EC).

        value_dim: channels m of the state; 1 is the usual (B, T, d). The next four options need m > 1.
        compressor: how a sublayer reads the state, along channels (CC), over tokens (TC), or "free", CC as
        the paper words it, a number for each feature and channel.
        kernel: its taps; None is m for "channel" (the only size that the code runs) and 4 for "token".
        embed_conv: open by a convolution of embed_kernel taps over tokens (EC), not by copies; None is yes.
        target_source, target_act, target_bias, target_scale: v = scale sigmoid(W u + b) of the raw read u,
        or of the context c = norm(u); "linear" drops scale and sigmoid. The paper's v = W c is
        ddl(target_source="context", target_act="linear", target_bias=False).
        target_const: v is this number; nothing is learned for it.
        gate: g is linear, or two layers with gate_hidden tanh units. beta0: beta where g's weights are 0.
        key_eps: eps of the key. write_only: do not erase, X' = X + beta k v^T (the paper's control).
        """

        value_dim: int = 1
        compressor: Literal["channel", "token", "free"] = "channel"
        kernel: int | None = None
        embed_conv: bool | None = None
        embed_kernel: int = 4
        target_source: Literal["raw", "context"] = "raw"
        target_act: Literal["sigmoid", "linear"] = "sigmoid"
        target_bias: bool = True
        target_scale: float = 4.0
        target_const: float | None = None
        gate: Literal["linear", "mlp"] = "linear"
        gate_hidden: int = 128
        beta0: float = 1.0
        key_eps: float = 1e-5
        write_only: bool = False

        @property
        def expanded(self) -> bool:
            """Whether the state has value channels."""
            return self.value_dim > 1

        @property
        def embeds(self) -> bool:
            """Whether the state is opened by a convolution."""
            return self.expanded and self.embed_conv is not False

        @property
        def taps(self) -> int:
            """The compressor's kernel size."""
            return self.kernel or (self.value_dim if self.compressor == "channel" else 4)

        def check(self) -> None:
            ranges = {
                "value_dim": (self.value_dim >= 1, "1 or more"),
                "kernel": (self.kernel is None or self.kernel >= 1, "1 or more, or None"),
                "embed_kernel": (self.embed_kernel >= 1, "1 or more"),
                "target_scale": (self.target_scale > 0, "a number above 0"),
                "gate_hidden": (self.gate_hidden >= 1, "1 or more"),
                "beta0": (0 <= self.beta0 <= 2, "0 to 2"),
                "key_eps": (self.key_eps > 0, "a number above 0: keys of zero output divide by it"),
            }
            for name, (fits, allowed) in ranges.items():
                if not fits:
                    raise InputError(f"ddl({name}={getattr(self, name)}): allowed is {allowed}")
            self._refuse_idle(
                self.expanded, "value_dim=1", "compressor", "kernel", "embed_conv", "embed_kernel"
            )
            self._refuse_idle(self.compressor != "free", "compressor='free'", "kernel")
            self._refuse_idle(self.embeds, "embed_conv=False", "embed_kernel")
            self._refuse_idle(
                self.target_const is None,
                "target_const",
                *("target_source", "target_act", "target_bias", "target_scale"),
            )
            self._refuse_idle(self.target_act == "sigmoid", "target_act='linear'", "target_scale")
            self._refuse_idle(self.gate == "mlp", "gate='linear'", "gate_hidden")
            most = 2 * self.value_dim - 1
            if self.expanded and self.compressor == "channel" and self.taps > most:
                raise InputError(
                    f"ddl(kernel={self.kernel}): {self.value_dim} channels meet {most} taps at most"
                )

        def _refuse_idle(self, applies: bool, because: str, *names: str) -> None:
            """Options that do nothing beside another one must be left at their defaults."""
            defaults = {f.name: f.default for f in dataclasses.fields(self)}
            for name in names:
                if not applies and getattr(self, name) != defaults[name]:
                    raise InputError(
                        f"ddl({name}={getattr(self, name)!r}) does nothing with {because}; leave it out"
                    )

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="gated",
                normalizer="sigmoid",
                injection="rewrite",
                reads_per_block=2,
                short_swa="no: one state is rewritten, no earlier layer is kept or compared",
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """Flops per token: in each sublayer rewrite 4 d m (2 without erase), gate 2 d or 2 r (d + 1),
            target 2 d m; there and at the end compressor 2 d m, or 2 d m (k + 1) over tokens; EC 2 d m k.
            """
            layout, d, m = shape.layout, shape.layout.d_model, self.value_dim
            sublayers, token = layout.n_sublayers, self.compressor == "token"
            gate = (d + 1) * self.gate_hidden if self.gate == "mlp" else d
            target = d * m if self.target_const is None else 0
            learned = d + gate + 1 + target + (m if target and self.target_bias else 0)
            opening = d * m * self.embed_kernel if self.embeds else 0
            kernel = d * m if self.compressor == "free" else d * self.taps * (m if token else 1) + m
            reading = d * m * (self.taps + 1 if token else 1)
            per_token = sublayers * (d * m * (1 if self.write_only else 2) + gate + target) + opening
            parameters = sublayers * learned + d + opening
            if self.expanded:
                per_token += (sublayers + 1) * reading
                parameters += (layout.n_blocks + 1) * kernel
            rows = d * shape.cache_rows(self.embed_kernel - 1) if self.embeds else 0
            if self.expanded and token:
                rows += (sublayers + 1) * d * m * shape.cache_rows(self.taps - 1)
            stored = "float64" if shape.dtype == "float64" else layout.state_dtype
            return Cost(
                parameters=parameters,
                flops_forward=2 * per_token * shape.tokens,
                flops_backward=4 * per_token * shape.tokens,
                decode_state_bytes=rows * shape.batch_size * DTYPES[stored].itemsize,
                boundary_bytes={"full": TensorSpec((shape.tokens, d, m), layout.state_dtype).nbytes},
            )

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        d, m, std = layout.d_model, cfg.value_dim, 0.5 / math.sqrt(layout.d_model)
        self.norm: nn.Module = RMSNorm(d, layout.norm_eps)
        hidden = cfg.gate_hidden if cfg.gate == "mlp" else d
        self.gate_in = nn.Linear(d, hidden, bias=False) if cfg.gate == "mlp" else None
        self.gate = nn.Linear(hidden, 1)
        self.target = nn.Linear(d, m, bias=cfg.target_bias) if cfg.target_const is None else None
        for layer in (self.gate_in, self.gate, self.target):
            if layer is not None:
                nn.init.normal_(layer.weight, std=std)
        p = min(max(cfg.beta0 / 2, 1e-6), 1 - 1e-6)
        nn.init.constant_(self.gate.bias, math.log(p / (1 - p)))
        self.compress = new_compressor(cfg, layout) if index == 0 else None
        self.memory = new_memory(cfg, layout)
        self._shared: tuple[
            Compressor, ...
        ] = ()  # the block's compressor, registered by its first connection

    @classmethod
    def for_block(cls, cfg: Any, layout: Layout, block: int) -> list[Connection]:
        first, *others = (cls(cfg, layout, block, index) for index in range(len(layout.blocks[block])))
        for other in others:
            other._shared = (first.compress,) if first.compress is not None else ()
        return [first, *others]

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return DDLStream(cfg, layout)

    def control(self, u: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Target v (B, T, m) and gate beta (B, T, 1) from the raw read u and its norm c, both (B, T, d)."""
        cfg, dtype = self.cfg, compute_dtype(u)
        with full_precision(u):
            context = cast(c, dtype)
            inner = context if self.gate_in is None else _linear(self.gate_in, context).tanh()
            beta = 2 * _linear(self.gate, inner).sigmoid()
            if self.target is None:
                return beta.new_full((*u.shape[:-1], cfg.value_dim), cfg.target_const), beta
            v = _linear(self.target, cast(u, dtype) if cfg.target_source == "raw" else context)
        return (cfg.target_scale * v.sigmoid() if cfg.target_act == "sigmoid" else v), beta

    def read(self, state: State, ctx: Context) -> tuple[Reads, tuple[Tensor, Tensor]]:
        compress = self._shared[0] if self._shared else self.compress
        found = None if self.gate_in else step(self.cfg, state, compress, self.norm, self.gate, self.target)
        if found is not None:
            c, v, beta = found
            return Reads(c), (v, beta)
        u = state if compress is None else compress(state, ctx, self.memory)
        c = self.norm(u)
        return Reads(c), self.control(u, c)

    def write(self, state: State, carry: tuple[Tensor, Tensor], y: Tensor, ctx: Context) -> State:
        v, beta = carry
        if self.cfg.write_only:
            return _write_only(state, y, v, beta, self.cfg.key_eps)
        return delta_rewrite(state, y, v, beta, self.cfg.key_eps)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in x's precision."""
    bias = None if layer.bias is None else cast(layer.bias, x.dtype)
    return F.linear(x, cast(layer.weight, x.dtype), bias)


def _write_only(state: Tensor, direction: Tensor, value: Tensor, gate: Tensor, eps: float) -> Tensor:
    """X + gate k v^T: the rewrite without its erase term."""
    with full_precision(state):
        X, h = state.to(value.dtype), direction.to(value.dtype)
        k = h / (h.square().sum(-1, keepdim=True) + eps**2).sqrt()
        step = gate * value
        if state.ndim > direction.ndim:
            k, step = k.unsqueeze(-1), step.unsqueeze(-2)
        return torch.addcmul(X, k, step).to(state.dtype)


DDL.Config.trace = DDLTrace
