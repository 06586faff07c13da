"""Hyper-Connections: n copies of the stream; every sublayer reads, mixes and writes them by learned weights.

h0 = A_m^T H,   H' = A_r^T H + B^T f(norm(h0))                      static (arXiv 2409.19606, eq. 2 and 3)
A_m += s_a tanh(N W_m),  A_r += s_a tanh(N W_r),  B += s_b tanh(N W_b),  N = norm(H) per stream       dynamic

 H (n streams) ──┬── A_m^T ── norm ── f ── B^T ──┐
                 └── A_r^T ──────────────────────+── H'     H_0 = n copies of the embeddings, y = sum_s H_s

Row s of A_r says where old stream s goes: new stream t is sum_s A_r[s, t] H_s + B_t f. Nothing bounds the
product of the A_r over layers.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth import ahead
from twoaxis.depth.connection import Connection, DepthConfig, State, Stream
from twoaxis.depth.hyper_trace import HyperTrace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import hyper_gates, stream_read, stream_scores, stream_write
from twoaxis.ops.native.few_tokens import folds
from twoaxis.ops.native.stream_gates import Form
from twoaxis.ops.native.stream_pass import Taking
from twoaxis.ops.native.streams_step import hyper_read
from twoaxis.ops.precision import cast, compute_dtype, few, full_precision
from twoaxis.ops.stream_gates import hyper_weights
from twoaxis.ops.stream_take import Taken, hyper_take
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

Carry = tuple[Tensor, Tensor] | Taken  # A_r^T and B; or of few tokens A_r^T H and B


@spec.register("depth", "hyper_connections")
class HyperConnections(Connection):
    """read: norm(A_m^T H); write: A_r^T H + B^T y.

    state: (B, T, n, d). `static` (n, n+2) holds [A_m | A_r | B] and starts at A_m = e_{k mod n} for sublayer
    k of the network, A_r = I, B = 1. `dynamic` (d, n+2) holds [W_m | W_r | W_b] and starts at 0, the scales s
    at 0.01. So every stream starts as the standard residual stream of the same weights. As in the paper
    `static` is not decayed and the matrix `dynamic` is; scales and gain are not. All of it runs in at least
    float32.
    """

    equation = "h0 = A_m^T H, H' = A_r^T H + B^T f(norm(h0))"
    source = "arXiv 2409.19606"

    class Config(DepthConfig):
        """streams: n, 4 in the paper. dynamic: weights that depend on the token. tanh: bounds their change.

        norm: of each stream, for the dynamic weights only: "layer" is LayerNorm without parameters (paper),
        "rms" is sqrt(d) x / |x| (1 + g) with a learned g (public code).
        """

        streams: int = 4
        dynamic: bool = True
        tanh: bool = True
        norm: Literal["layer", "rms"] = "layer"

        def check(self) -> None:
            if self.streams < 1:
                raise InputError(f"hyper_connections(streams={self.streams}): allowed is 1 or more")
            if not self.dynamic and (not self.tanh or self.norm != "layer"):
                raise InputError(
                    "hyper_connections(dynamic=False): tanh and norm are for dynamic weights; leave them out"
                )

        def core_options(self, kind: str, block: int, n_blocks: int) -> dict[str, Any]:
            """Output projections start sqrt(n) times larger (the paper's rule for the summed read-out)."""
            return {"output_scale": math.sqrt(self.streams)}

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="stream",
                weights="gated" if self.dynamic else "static",
                injection="mix",
                reads_per_block=2,
                short_swa="no: layers are summed into n running streams, none is kept or compared",
            )

        def standard_start(self) -> StandardStart:
            """The read-out is n times the standard stream, which the final norm removes up to its eps."""
            return "exact" if self.streams == 1 else "up to eps"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """2 d n (n + 2) flops per token and sublayer to read, mix, write; as many for dynamic weights."""
            n, d, sublayers = self.streams, shape.layout.d_model, shape.layout.n_sublayers
            learned = (
                n * (n + 2) + (d * (n + 2) + 2 if self.dynamic else 0) + (d if self.norm == "rms" else 0)
            )
            products = 2 * d * n * (n + 2) * (2 if self.dynamic else 1) * sublayers * shape.tokens
            streams = TensorSpec((shape.batch_size, shape.seq_len, n, d), shape.layout.state_dtype)
            return Cost(
                parameters=sublayers * (learned + d) + d,
                flops_forward=products,
                flops_backward=2 * products,
                boundary_bytes={"full": streams.nbytes},
            )

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        n, d = cfg.streams, layout.d_model
        self.norm: nn.Module = RMSNorm(d, layout.norm_eps)
        read = F.one_hot(torch.tensor(layout.sublayer(block, index) % n), n).float()
        self.static = nn.Parameter(torch.cat((read[:, None], torch.eye(n), torch.ones(n, 1)), 1))
        if cfg.dynamic:
            self.dynamic = nn.Parameter(torch.zeros(d, n + 2))
            self.s_alpha = nn.Parameter(torch.tensor(0.01))
            self.s_beta = nn.Parameter(torch.tensor(0.01))
        self.gain = nn.Parameter(torch.zeros(d)) if cfg.norm == "rms" else None

    def scores(self, H: Tensor) -> Tensor:
        """N [W_m | W_r | W_b] of every token, (B, T, n, n+2), in at least float32."""
        W = cast(self.dynamic, compute_dtype(H))
        if self.gain is None:
            return stream_scores(H, W, self.layout.norm_eps)
        H = cast(H, W.dtype)  # the norm's factor per stream and its gain commute with the product
        length = torch.linalg.vector_norm(H, dim=-1, keepdim=True).clamp_min(1e-12)
        return H @ ((1 + self.gain.to(H.dtype))[:, None] * W) * (math.sqrt(H.shape[-1]) / length)

    def weights(self, H: Tensor) -> Tensor:
        """[A_m | A_r | B] of every token, (B, T, n, n+2), or (1, 1, n, n+2), in at least float32."""
        if not self.cfg.dynamic:
            return cast(self.static, compute_dtype(H)).expand(1, 1, -1, -1)
        return hyper_weights(self.scores(H), self.static, self.s_alpha, self.s_beta, tanh=self.cfg.tanh)

    def gates(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_m, A_r^T and B of `weights`, in one operation on scores."""
        if not self.cfg.dynamic:
            weights = self.weights(H)
            return weights[..., 0], weights[..., 1:-1].mT, weights[..., -1]
        return hyper_gates(self.scores(H), self.static, self.s_alpha, self.s_beta, tanh=self.cfg.tanh)

    def step(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """norm(A_m^T H), B (N, n, 1) and A_r^T H (N, n, d) in one call, in a step of decoding; None: by `weights`."""
        if not self.cfg.dynamic or self.gain is not None or not folds(self.norm):
            return None
        scales, eps = (self.s_alpha, self.s_beta), self.layout.norm_eps
        options = {"norm_eps": eps, "output_eps": self.norm.eps}
        return hyper_read(
            H, self.static, self.dynamic, scales, self.norm.weight, tanh=self.cfg.tanh, **options
        )

    def taking(self, streams: int) -> Taking | None:
        """The read and the gates as one node; None: by `gates`."""
        if not self.cfg.dynamic or self.gain is not None or not isinstance(self.norm, RMSNorm):
            return None
        form, scales = Form(False, streams, tanh=self.cfg.tanh), (self.s_alpha, self.s_beta)
        norm = self.norm
        return Taking(form, self.dynamic, self.static, scales, norm.weight, self.layout.norm_eps, norm.eps)

    def take(self, H: Tensor) -> Taken | None:
        """All that the sublayer takes, made ahead or now; None: by `gates`."""
        taking = self.taking(H.shape[-2])
        return None if taking is None else hyper_take(H, taking, ahead.made(taking, H))

    def read(self, state: State, ctx: Context) -> tuple[Reads, Carry]:
        if (found := self.step(state)) is not None:
            h, B, mixed = found
            return Reads(h), (mixed, B)
        if (taken := self.take(state)) is not None:
            return Reads(taken.read), taken
        with full_precision(state):
            if few((state,)):
                weights = self.weights(state)
                return self.read_few(cast(state, weights.dtype), weights, state.dtype)
            read, mixing, write = self.gates(state)
        return Reads(read_streams(state, read, self.norm)), (mixing, write)

    def read_few(self, H: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Reads, tuple[Tensor, Tensor]]:
        """The read in the few tokens of a step: one product reads and mixes, and the streams are carried mixed."""
        n, tokens = self.cfg.streams, H.shape[0] * H.shape[1]
        weights = weights.expand(*H.shape[:2], -1, -1).reshape(tokens, n, n + 2)
        mixed = torch.bmm(weights.mT, H.view(tokens, n, -1))  # (N, n + 2, d), of which the last row is idle
        h0 = cast(mixed[:, 0], dtype).view(*H.shape[:2], -1)
        return Reads(self.norm(h0)), (mixed[:, 1:-1], weights[..., -1:])

    def write(self, state: State, carry: Carry, y: Tensor, ctx: Context) -> State:
        if isinstance(carry, Taken):
            return ahead.write(self, carry, state, y)
        A_r, B = carry
        if A_r.ndim > 3:
            return stream_write(state, A_r, B, y)
        with full_precision(state):  # H was mixed by the read
            o = cast(y, A_r.dtype).view(len(A_r), 1, -1)
            return cast(torch.addcmul(A_r, B, o).view(state.shape), state.dtype)

    def param_rule(self, name: str) -> ParamRule:
        return ParamRule(decay=name == "dynamic")

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        return HyperStream(cfg, layout)


def read_streams(state: Tensor, weights: Tensor, norm: nn.Module) -> Tensor:
    """norm(sum_s w_s X_s), (B, T, d); the read is kept by nobody if the norm is the usual one."""
    if isinstance(norm, RMSNorm):
        return stream_read(state, weights, gain=norm.weight, eps=norm.eps)
    read: Tensor = norm(stream_read(state, weights))
    return read


class HyperStream(Stream):
    """Opens with n copies of the embeddings, closes with the final norm of the sum of the streams."""

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(layout)
        self.streams = cfg.streams

    def open(self, x: Tensor, ctx: Context) -> State:
        return x.unsqueeze(2).repeat(1, 1, self.streams, 1)

    def readout(self, state: State) -> Tensor:
        """y = sum_s H_s (B, T, d), before the final norm."""
        return state.sum(2, dtype=compute_dtype(state)).to(state.dtype)

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(self.readout(state))

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        layout = self.layout
        return {"stream": TensorSpec((batch_size, seq_len, self.streams, layout.d_model), layout.state_dtype)}


HyperConnections.Config.trace = HyperTrace
