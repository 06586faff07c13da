"""A generalised residual network, the read of DeepCrossAttention (arXiv 2502.06785)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.depth.history import History
from twoaxis.ops import gated_mix, mix
from twoaxis.ops.known_gates import gained
from twoaxis.ops.native.few_tokens import gated
from twoaxis.types import Layout


class GRN(nn.Module):
    """A generalised residual network: `reads` mixtures of n sources.

    b (reads, n, d), or (reads, n) in v1, starts at 1; w (reads, d), v3 alone, at 0; gain (d,), of the
    score's norm and shared by the reads, at 1.
    """

    def __init__(self, cfg: Any, layout: Layout, n_sources: int, reads: int) -> None:
        super().__init__()
        d = layout.d_model
        self.norm_eps = layout.norm_eps if cfg.gate_norm else None
        self.b = nn.Parameter(torch.ones((reads, n_sources) if cfg.grn == "v1" else (reads, n_sources, d)))
        self.w = nn.Parameter(torch.zeros(reads, d)) if cfg.grn == "v3" else None
        self.gain = nn.Parameter(torch.ones(d)) if cfg.gate_norm else None

    def known_gates(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """b, w and its gain: see `ops/known_gates.py`."""
        return None if self.w is None else (self.b, self.w, self.gain)

    def step(
        self, sources: History, norms: Sequence[nn.Module | None]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """The mixtures, and those with a norm after it, in one call in a step of decoding; None: by `forward`."""
        if self.w is None or len(sources) != self.b.shape[1] or sources.sums:
            return None
        w = self.w if self.gain is None else self.w * self.gain
        return gated(sources.sources, self.b, w, self.norm_eps, norms)

    def forward(self, sources: History) -> tuple[Tensor, ...]:
        """The mixtures of all n sources, each like a source; or what some, by their index, add to them."""
        b = self.b if len(sources) == self.b.shape[1] else self.b[:, list(sources.index)]
        if self.w is None:
            return tuple(mix(sources.sources, row) for row in b)
        w = gained(self.w, self.gain)
        return gated_mix(sources.sources, b, w, norm_eps=self.norm_eps)
