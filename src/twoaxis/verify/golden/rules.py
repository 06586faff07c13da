"""How close is equal: one table of bounds.

The error of a tensor is max |computed - recorded| / max(1, max |recorded|). The recorded values carry the
rounding of the code that made them, in the file's dtype, and the computed ones carry ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """The largest error of an output and of a gradient, and why that much."""

    output: float
    gradient: float
    why: str


FLOAT64 = Bound(1e-12, 1e-12, "float64 files: rounding only")
FLOAT32 = Bound(
    5e-6, 2e-5, "float32 layers: a float64 re-implementation is within 1e-6 / 1e-5 of the recordings"
)
ATTNRES = Bound(2e-5, 1e-4, "float32 depth-attention reads and stacks: recordings within 2e-6 / 2e-5")
SHORTCUT = Bound(5e-6, 5e-6, "float32 rewrites and mixes: recordings within 9.2e-7 / 1.7e-6")
MODEL = Bound(
    1e-4, 2e-4, "float32 whole models: recorded logits within 1e-5, hidden states 2.2e-5, gradients 2.9e-5"
)

_FLOAT32_BY_FAMILY = {
    "attnres_read": ATTNRES,
    "attnres_full": ATTNRES,
    "attnres_block": ATTNRES,
    "delta_attnres": ATTNRES,
    "muddformer": ATTNRES,
    "ddl": SHORTCUT,
    "hc": SHORTCUT,
    "mhc": SHORTCUT,
}


def bound(family: str, stem: str, dtype: torch.dtype) -> Bound | None:
    """The bound for a tensor recorded in `dtype` in a case of a family; None where no rule is known."""
    if dtype == torch.float64:
        return FLOAT64
    if dtype == torch.float32:
        return MODEL if stem.startswith("model") else _FLOAT32_BY_FAMILY.get(family, FLOAT32)
    return None


def error(computed: Tensor, recorded: Tensor) -> float:
    """max |computed - recorded| / max(1, max |recorded|); of integers and booleans 0 if equal, else inf."""
    if not recorded.is_floating_point():
        return 0.0 if torch.equal(computed.to(recorded.dtype), recorded) else float("inf")
    if recorded.numel() == 0:
        return 0.0
    difference = (computed.detach().double() - recorded.double()).abs().max()
    return float(difference / recorded.double().abs().max().clamp(min=1.0))
