"""One read of Attention Residuals: its weights, and what they make of a tuple of sources."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops import depth_read, rms, token_mix
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.types import Layout


class Route(nn.Module):
    """READ(w, g; V) = sum_i softmax_i(<w, g * rms(V_i)>) V_i, in slices of d with `heads`.

    query w: (r,), static, or made from the newest source by W (r, d), w = W rms(V_n); either starts at zero,
    so that all sources count alike. key_gain g (r,) starts at one. r is d, or `key_rank`: keys are then the
    last r features of a source, normed by themselves, and values stay whole.
    """

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__()
        d = layout.d_model
        self.rank, self.width = cfg.key_rank or d, d
        if self.rank > d or d % cfg.heads:
            raise InputError(
                f"attnres(heads={cfg.heads}, key_rank={cfg.key_rank}) at d_model={d}: heads must divide "
                "d_model and key_rank must not exceed it"
            )
        self.eps, self.scale_eps, self.heads = cfg.key_norm_eps, cfg.scale_eps, cfg.heads
        self.query = nn.Parameter(
            torch.zeros(self.rank, d) if cfg.query == "input" else torch.zeros(self.rank)
        )
        self.key_gain = nn.Parameter(torch.ones(self.rank)) if cfg.key_gain else None

    def known_query(self) -> tuple[Tensor, Tensor | None] | None:
        """Query and key gain, if they are the same for all tokens: see `ops/known_read.py`."""
        whole = self.query.ndim == 1 and self.rank == self.width
        return (self.query, self.key_gain) if whole and self.heads == 1 else None

    def forward(self, sources: tuple[Tensor, ...], norm: RMSNorm | None = None) -> Tensor:
        """READ(w, g; sources), followed by `norm`, which the operator folds in, so that h_s is not kept."""
        gain, eps = (None, None) if norm is None else (norm.weight, norm.eps)
        if eps is not None and self.scale_eps:
            eps /= len(sources) ** 2
        query = self.query if self.query.ndim == 1 else self._query_of(sources[-1])
        d = sources[0].shape[-1]
        if self.rank == d:
            return depth_read(
                query,
                sources,
                key_gain=self.key_gain,
                key_norm_eps=self.eps,
                heads=self.heads,
                output_gain=gain,
                output_eps=eps,
            )
        keys = tuple(v[..., d - self.rank :] for v in sources)
        _, weights = depth_read(
            query, keys, key_gain=self.key_gain, key_norm_eps=self.eps, return_weights=True
        )
        (h,) = token_mix(sources, weights.unsqueeze(-2))
        return h if eps is None or gain is None else F.rms_norm(h, (d,), gain.to(h.dtype), eps)

    def _query_of(self, newest: Tensor) -> Tensor:
        """W rms(newest), (B, T, r)."""
        dtype = compute_dtype(newest)
        with full_precision(newest):
            return F.linear(rms(newest.to(dtype), self.eps), self.query.to(dtype))
