"""The three precisions: what is computed in which dtype.

| name        | weights of the model | master weights | products | residual state        |
|-------------|----------------------|----------------|----------|-----------------------|
| float32     | float32              | the same       | float32  | state_dtype           |
| autocast    | float32              | the same       | bfloat16 | state_dtype           |
| bf16_master | bfloat16             | float32        | bfloat16 | state_dtype           |

Optimiser, checkpoints and gradient sums always use the master weights.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass runs."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
