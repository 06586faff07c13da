"""What torch's dispatcher launches: every operation that is no view and no bare allocation, and the bytes it moves."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FREE = {  # these launch nothing
    *("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "_reshape_alias"),
    *("_local_scalar_dense", "promote_types"),
}


class Kernels(TorchDispatchMode):
    """Counts launches, and bytes of tensors read and written, while it is on; our own kernels step back for it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = (r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if func._overloadpacket.__name__ not in FREE and not any(views):
            self.launches += 1
            self.nbytes += sum(map(_nbytes, pytree.tree_leaves((args, kwargs, out))))
        return out


def _nbytes(x: Any) -> int:
    return min(x.nbytes, x.untyped_storage().nbytes()) if isinstance(x, Tensor) else 0


def counted(model: Any, tokens: Tensor) -> tuple[Kernels, Kernels]:
    """Of one training step, forward and backward."""
    targets = tokens.clone()
    with torch.random.fork_rng(devices=[]), Kernels() as forward:
        loss = model.loss(tokens, targets)
    with Kernels() as backward:
        loss.backward()
    return forward, backward
