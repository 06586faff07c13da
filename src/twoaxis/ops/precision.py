"""The precision rule of every operator: at least float32 inside, one cast at the end."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Float64 if any tensor is float64, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not touch the reductions on `x`'s device."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
