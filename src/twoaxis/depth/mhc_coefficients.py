"""The numbers that mHC makes from all streams of a token: logits of its gates, its mixing and its head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.norm import RMSNorm
from twoaxis.ops import joint_scores, mhc_gates
from twoaxis.ops.native import streams_step
from twoaxis.ops.native.few_tokens import folds
from twoaxis.ops.native.stream_gates import Form
from twoaxis.ops.native.stream_pass import Taking
from twoaxis.ops.precision import cast, compute_dtype
from twoaxis.types import Layout


class Coefficients(nn.Module):
    """a (z phi) + b from streams X, z = vec(X) / rms(vec(X)); one scale a for each group of columns.

    sizes: columns of each group, 0 for none. phi (n d, columns) starts at 0 with a = 0.01, or with
    start="random" at N(0, init_std^2) with a = 1; b at 0. A static one has b alone.
    """

    def __init__(self, cfg: Any, layout: Layout, sizes: list[int]) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, layout.norm_eps
        self.used = [size for size in sizes if size]
        self.bias = nn.Parameter(torch.zeros(sum(sizes))) if self.used else None
        self.group: torch.Tensor
        self.phi: nn.Parameter | None = None
        self.scale: nn.Parameter | None = None
        if cfg.dynamic and self.used:
            std, a = (layout.init_std, 1.0) if cfg.start == "random" else (0.0, 0.01)
            self.phi = nn.Parameter(torch.randn(cfg.streams * layout.d_model, sum(sizes)) * std)
            self.scale = nn.Parameter(torch.full((len(self.used),), a))
            group = torch.arange(len(self.used)).repeat_interleave(
                torch.tensor(self.used), output_size=sum(self.used)
            )
            self.register_buffer("group", group, persistent=False)  # of each column

    def start_at(self, bias: Tensor) -> None:
        """Set b."""
        if self.bias is not None:
            self.bias.data.copy_(bias)

    def project(self, X: Tensor) -> Tensor:
        """z phi (B, T, columns); the division by the rms comes after the product."""
        assert self.phi is not None
        return joint_scores(X, self.phi, self.eps)

    def step(self, cfg: Any, X: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
        """norm(P X), Q (N, n, 1) and H X (N, n, d) in one call, in a step of decoding; None where it takes more."""
        covered = cfg.mixing == "sinkhorn" and cfg.gates == "sigmoid" and not cfg.eps
        if self.phi is None or not covered or not folds(norm):
            return None
        return streams_step.mhc_read(
            X, self.phi, self.scale, self.bias, norm.weight, iterations=cfg.iterations,
            rows_last=cfg.last == "rows", norm_eps=self.eps, output_eps=norm.eps, write_scale=cfg.write_scale,
        )  # fmt: skip

    def taking(self, cfg: Any, streams: int, norm: nn.Module) -> Taking | None:
        """norm(P X), H, Q and X as one node of the graph; None where it takes more."""
        covered = cfg.mixing == "sinkhorn" and cfg.gates == "sigmoid" and not cfg.eps
        if self.phi is None or self.scale is None or self.bias is None or not covered:
            return None
        if not isinstance(norm, RMSNorm):
            return None
        form = Form(True, streams, False, cfg.iterations, cfg.last == "rows", cfg.write_scale)
        return Taking(form, self.phi, self.bias, (self.scale,), norm.weight, self.eps, norm.eps)

    def gates(self, cfg: Any, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """P, Q and H by one operator; None where it takes more."""
        covered = cfg.mixing == "sinkhorn" and cfg.gates == "sigmoid"
        if self.phi is None or self.scale is None or self.bias is None or not covered:
            return None
        return mhc_gates(
            self.project(X), self.scale, self.bias, cfg.streams,
            iterations=cfg.iterations, last=cfg.last, eps=cfg.eps, write_scale=cfg.write_scale,
        )  # fmt: skip

    def forward(self, X: Tensor) -> tuple[Tensor, ...]:
        """The logits of each group (B, T, size), or (1, 1, size) without phi, in at least float32."""
        dtype = compute_dtype(X)
        if self.bias is None:
            return X.new_zeros(1, 1, 0, dtype=dtype).split(self.sizes, -1)
        logits = cast(self.bias, dtype)
        if self.phi is None or self.scale is None:
            logits = logits.expand(1, 1, -1)
        else:
            logits = torch.addcmul(logits, self.project(X), cast(self.scale, dtype)[self.group])
        return logits.split_with_sizes(self.sizes, -1)
