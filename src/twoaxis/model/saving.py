"""What stays between the forward and the backward pass, for any method: all, less, or all of it in another memory.

all      everything that operators keep
blocks   of a block its input alone; backward runs it once more
cores    all but what cores keep: depth reads and writes are kept, attention and MLP run once more
host     everything, in the host's memory; backward brings each tensor back when it is needed
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from twoaxis.errors import InputError
from twoaxis.model.offload import Offload

Saved = Literal["all", "blocks", "cores", "host"]
HALVES = ("project", "attend", "gather", "finish")  # what depth methods call of an attention


@dataclass(frozen=True)
class Saving:
    """saved: see the module. every: "blocks" and "cores" concern every so many-th block only, from the first."""

    saved: Saved = "all"
    every: int = 1

    def __post_init__(self) -> None:
        if self.saved not in get_args(Saved):
            raise InputError(f"saved={self.saved!r}: allowed is {', '.join(get_args(Saved))}")
        if type(self.every) is not int or self.every < 1:
            raise InputError(f"every={self.every!r}: allowed is an integer of 1 or more")

    @property
    def recomputes(self) -> bool:
        """Whether backward runs something once more."""
        return self.saved in ("blocks", "cores")

    def through(self, block: nn.Module, index: int, state: Any, ctx: Any) -> Any:
        """The state after a block; nothing is given up in evaluation, without gradients or with a cache."""
        wanted = block.training and ctx.cache is None and torch.is_grad_enabled()
        if not (wanted and self.recomputes and index % self.every == 0):
            return block(state, ctx)
        if self.saved == "blocks":
            return checkpoint(block, state, ctx, use_reentrant=False)
        return block(state, ctx, Recomputed)

    def around(self, model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass of a model, or of a part of it, on a device."""
        if self.saved == "host" and model.training and torch.is_grad_enabled():
            return Offload(model, device)
        return contextlib.nullcontext()


class Recomputed:
    """A core that keeps its inputs alone; to the depth method it is the core."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        core: type = type(self._core)
        return core

    def __call__(self, *args: Any) -> Any:
        """The core's output."""
        return checkpoint(self._core, *args, use_reentrant=False)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        if name in HALVES:
            return partial(checkpoint, found, use_reentrant=False)
        return [Recomputed(core) for core in found] if name == "cores" else found
