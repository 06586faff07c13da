"""One read of Delta Attention Residuals: its weights, its gates, and what they make of a tuple of sources."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.ops import depth_read
from twoaxis.ops.native.few_tokens import folds, scored
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.ops.token_read import Options
from twoaxis.types import Layout


class DeltaRead(nn.Module):
    """g READ(w, gain; null, sources). w (d,) starts at 0, the gain (d,) at 1, the null source (d,) at 0.

    of_values: a second read of the same sources for the values, with a query and gain of its own; null source
    and gates are shared, as in the released code.
    """

    def __init__(self, cfg: Any, layout: Layout, n_sources: int, of_values: bool = False) -> None:
        super().__init__()
        d, weighed = layout.d_model, n_sources + cfg.null_source > 1
        self.eps, self.gate = cfg.key_norm_eps, cfg.gate
        self.plain = cfg.gate == "none" and not (cfg.null_source or cfg.pre_gated or of_values)
        self.query = nn.Parameter(torch.zeros(d)) if weighed else None
        self.key_gain = nn.Parameter(torch.ones(d)) if weighed and cfg.key_gain else None
        self.value_query = nn.Parameter(torch.zeros(d)) if of_values else None
        self.value_gain = nn.Parameter(torch.ones(d)) if of_values and cfg.key_gain else None
        self.null = nn.Parameter(torch.zeros(d)) if cfg.null_source else None
        self.pre_weight = nn.Parameter(torch.zeros(d, d)) if cfg.pre_gated else None
        self.pre_bias = nn.Parameter(torch.zeros(d)) if cfg.pre_gated else None
        self.gate_weight = nn.Parameter(torch.zeros(d, d)) if cfg.gate == "vector" else None
        start = {"none": None, "scalar": torch.tensor(-2.0), "vector": torch.full((d,), -2.0)}
        value = start.get(cfg.gate, torch.tensor(0.0))
        self.gate_bias = None if value is None else nn.Parameter(value)

    def known_query(self) -> tuple[Tensor, Tensor | None] | None:
        """The query and its key gain, where sources are read as they are: see `ops/known_read.py`."""
        raw = self.null is None and self.pre_weight is None
        return (self.query, self.key_gain) if raw and self.query is not None else None

    def forward(self, sources: tuple[Tensor, ...], H: Tensor) -> list[Tensor]:
        """What is added to H (B, T, d): for all inputs of the sublayer, then, if of_values, for its values."""
        if self.null is not None:
            sources = (self.null.to(H.dtype).expand_as(H), *sources)
        if self.pre_weight is not None:
            g = self._sigmoid(H, self.pre_weight, self.pre_bias).to(H.dtype)
            sources = tuple(g * v for v in sources)
        if self.query is None:
            return [self._gated(sources[0], H)]
        reads = [depth_read(self.query, sources, key_gain=self.key_gain, key_norm_eps=self.eps)]
        if self.value_query is not None:
            query, gain = self.value_query, self.value_gain
            reads.append(depth_read(query, sources, key_gain=gain, key_norm_eps=self.eps))
        return [self._gated(read, H) for read in reads]

    def step(self, sources: tuple[Tensor, ...], H: Tensor, norm: nn.Module) -> Tensor | None:
        """norm(H + READ) in one call, in a step of decoding by the plain form; None: by `forward`."""
        if self.query is None or not self.plain or not folds(norm):
            return None
        options = Options(self.eps, 1.0, "softmax", 1, norm.eps, False)
        found = scored(options, self.query, self.key_gain, norm.weight, None, sources, skip=H)
        return None if found is None else found[0]

    def _gated(self, read: Tensor, H: Tensor) -> Tensor:
        """g times the read."""
        if self.gate_bias is None:
            return read
        dtype = compute_dtype(H)
        if self.gate_weight is not None:
            g = self._sigmoid(H, self.gate_weight, self.gate_bias)
        else:
            g = self.gate_bias.to(dtype)
            g = g if self.gate == "alpha" else g.sigmoid()
        return (g * read).to(H.dtype)

    def _sigmoid(self, H: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """sigmoid(W H + c) in at least float32."""
        dtype = compute_dtype(H)
        with full_precision(H):
            return F.linear(H.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).sigmoid()
