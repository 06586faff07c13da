"""MUDDFormer's options and its mix: weighted sums of all sources, the weights made from the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth.connection import DepthConfig, qkv_index
from twoaxis.depth.history import check_window, newest, source_specs
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import mix, rms, token_mix, traced
from twoaxis.ops.native.few_tokens import made
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.tape import Array, Tape
from twoaxis.types import Coordinates, Cost, Layout, Shape, StandardStart, TensorSpec


class MUDDConfig(DepthConfig):
    """Options of MUDDFormer.

    ways: inputs with a mix of their own; 4: Q, K, V, R; 3: K, V, R; 2: V, R; 1: one mix for all. Inputs
    without one read the R way. dynamic: weights made from the newest source, else static (then one way is
    DenseFormer). pre_post_norm: sources are normed, Z^c = X_i + norm(sum_j A[c, j] norm(X_j)) with a small
    gain; for deep and narrow models. pre_post_form: "paper", or "code": the outer norm on the R way alone and
    a gain on the weight generator's norm (the JAX training code). reallocate_mlp: MLPs from half to 1.5 times
    their width, over depth. round64: the generator's width becomes the next multiple of 64. expand_last: the
    last generator is four times as wide. gelu: of the generator; "erf" (PyTorch code) or "tanh" (JAX code).
    window_blocks: a mix sees the embeddings and so many newest block outputs (the paper's SW-n); None is all.
    """

    keeps_history = True
    ways: Literal[1, 2, 3, 4] = 4
    dynamic: bool = True
    pre_post_norm: bool = False
    pre_post_form: Literal["paper", "code"] = "paper"
    reallocate_mlp: bool = False
    round64: bool = True
    expand_last: bool = True
    gelu: Literal["erf", "tanh"] = "erf"
    window_blocks: int | None = None

    def check(self) -> None:
        check_window(self.name, "window_blocks", self.window_blocks)
        if self.pre_post_form == "code" and not self.pre_post_norm:
            raise InputError("muddformer(pre_post_form='code') needs pre_post_norm=True")
        if not self.dynamic and (not self.round64 or not self.expand_last or self.gelu != "erf"):
            raise InputError(
                "muddformer(dynamic=False): round64, expand_last and gelu are for dynamic weights; "
                "leave them out"
            )

    @property
    def way_names(self) -> tuple[str, ...]:
        """The ways with a mix of their own, in the order of its rows."""
        return ("q", "k", "v", "r")[4 - self.ways :]

    def history_options(self, kind: str, count: int) -> dict[str, Any]:
        return {"window_blocks": count} if kind == "window" else {}

    def kept(self, depth: int) -> list[int]:
        """Of X_0 .. X_depth those that the mix after `depth` blocks sees."""
        return [0, *newest(depth + 1, self.window_blocks)] if self.skips(depth) else list(range(depth + 1))

    def skips(self, depth: int) -> bool:
        """Whether the window leaves something out after `depth` blocks."""
        return self.window_blocks is not None and depth > self.window_blocks

    def hidden(self, n_sources: int, ways: int, last: bool) -> int:
        """The generator's width: C n, four times that in the last one, and with round64 always rounded up."""
        width = ways * n_sources * (4 if last and self.expand_last else 1)
        return (width // 64 + 1) * 64 if self.round64 else width

    def core_options(self, kind: str, block: int, n_blocks: int) -> dict[str, Any]:
        if not self.reallocate_mlp or n_blocks == 1:
            return {}
        return {"hidden_scale": 0.5 + block / (n_blocks - 1)}

    def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
        """The state after `depth` blocks."""
        sources = source_specs("sources", self.kept(depth), tensor, layout, carried=not self.pre_post_norm)
        return {**sources, "stream": tensor} if self.pre_post_norm else sources

    def coordinates(self) -> Coordinates:
        return Coordinates(
            source="stream",
            weights="gated" if self.dynamic else "static",
            sharing="per block and way",
            injection="replace",
            reads_per_block=self.ways,
            short_swa="no: weights belong to depth positions; without softmax they need not sum to 1",
        )

    def standard_start(self) -> StandardStart:
        return "no" if self.reallocate_mlp else "exact"  # the MLPs are not the standard ones

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """Per token and mix of n sources into C ways, h the generator's width: 2 d h + 2 h C n flops for the
        weights and 2 C n d for the sums, twice that backward.
        """
        layout, d = shape.layout, shape.layout.d_model
        if self.ways > 1:
            for index in range(1, layout.n_blocks):
                qkv_index(layout, index, self.name)
        last = (len(self.kept(layout.n_blocks)), 1, True)
        numbers = flops = 0
        for n, ways, ends in [
            *((len(self.kept(n)), self.ways, False) for n in range(1, layout.n_blocks)),
            last,
        ]:
            hidden = self.hidden(n, ways, ends) if self.dynamic else 0
            numbers += ways * n + hidden * (d + ways * n)
            numbers += len({"k", "v"} & set(self.way_names)) * d * (not ends)
            if self.pre_post_norm:
                numbers += d + (d if self.dynamic and self.pre_post_form == "code" else 0)
            flops += 2 * hidden * (d + ways * n) + 2 * ways * n * d
        if self.pre_post_norm:
            numbers += (layout.n_blocks + 1) * d
        return self.network_cost(shape, numbers, flops)


class DenseMix(nn.Module):
    """C sums of n sources (B, T, d): A[c, j] = W2 gelu(W1 rms(newest)) + a, row c n + j of W2.

    W1 (h, d) starts as N(0, 1/d), W2 (C n, h) at 0, a (C, n) one-hot at the newest source. With
    `pre_post_norm` a starts at 0 and the gain of the outer norm at 1e-3.
    """

    def __init__(self, cfg: Any, layout: Layout, n_sources: int, ways: int, last: bool = False) -> None:
        super().__init__()
        d, hidden = layout.d_model, cfg.hidden(n_sources, ways, last)
        self.cfg, self.ways, self.eps = cfg, ways, layout.norm_eps
        static = torch.zeros(ways, n_sources)
        static[:, -1] = 0.0 if cfg.pre_post_norm else 1.0
        self.static = nn.Parameter(static)
        self.down = nn.Parameter(torch.randn(hidden, d) * d**-0.5) if cfg.dynamic else None
        self.up = nn.Parameter(torch.zeros(ways * n_sources, hidden)) if cfg.dynamic else None
        code = cfg.dynamic and cfg.pre_post_norm and cfg.pre_post_form == "code"
        self.gain = nn.Parameter(torch.ones(d)) if code else None
        self.post_norm = RMSNorm(d, layout.norm_eps) if cfg.pre_post_norm else None
        if self.post_norm is not None:
            nn.init.constant_(self.post_norm.weight, 1e-3)

    def weights(self, newest: Tensor) -> Tensor:
        """A, (C, n), or (B, T, C, n) when it depends on the token; at least float32."""
        if self.down is None or self.up is None:
            return self.static
        dtype = compute_dtype(newest)
        with full_precision(newest):
            h = rms(newest.to(dtype), self.eps)
            h = h if self.gain is None else h * self.gain.to(dtype)
            approximate = "tanh" if self.cfg.gelu == "tanh" else "none"
            h = F.gelu(F.linear(h, self.down.to(dtype)), approximate=approximate)
            A = F.linear(h, self.up.to(dtype)).unflatten(-1, self.static.shape)
            return A + self.static.to(dtype)

    def step(
        self, sources: tuple[Tensor, ...], newest: Tensor, norms: Sequence[nn.Module | None]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """All ways, and those with a norm after it, in one call in a step of decoding; None: by `forward`."""
        if self.down is None or self.up is None or self.post_norm is not None:
            return None
        down, gelu = self.down, self.cfg.gelu
        return made(sources, newest, self.up, self.static, eps=self.eps, down=down, gelu=gelu, norms=norms)

    def forward(self, sources: tuple[Tensor, ...], newest: Tensor) -> tuple[Tensor, ...]:
        """Z^c, one tensor (B, T, d) per way; `newest` is the last source, before its norm if it has one."""
        A = self.weights(newest)
        ways = token_mix(sources, A) if A.ndim > 2 else tuple(mix(sources, A_c) for A_c in A.unbind(0))
        if self.post_norm is None:
            return ways
        normed = [self.cfg.pre_post_form == "paper" or c == self.ways - 1 for c in range(self.ways)]
        return tuple(newest + (self.post_norm(z) if n else z) for z, n in zip(ways, normed, strict=True))


def dense_mix_trace(t: Tape, cfg: MUDDConfig, state: Any, ways: int, last: bool = False) -> list[Array]:
    """A `DenseMix` in sizes alone."""
    sources = state["sources"].sources
    newest, n = state.get("stream", sources[-1]), len(sources)
    if cfg.dynamic:
        h = t.norm(t.cast(newest, t.wide), gain=cfg.pre_post_form == "code")
        h = t.map("gelu", t.linear(h, cfg.hidden(n, ways, last)))
        mixed = traced.token_mix(t, sources, t.add(t.linear(h, ways * n), t.weight(ways * n)), ways)
    else:
        mixed = [traced.mix(t, sources) for _ in range(ways)]
    if not cfg.pre_post_norm:
        return mixed
    normed = [cfg.pre_post_form == "paper" or c == ways - 1 for c in range(ways)]
    return [t.add(newest, t.norm(z) if n else z) for z, n in zip(mixed, normed, strict=True)]
