"""Tensors that autograd saves, kept in the host's memory between the two passes.

Each piece of memory is copied once, however many operators save it or views of it: a source that n depth reads save is
one copy. Backward copies it back once as long as somebody still holds on to it.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

Key = tuple[int, int, torch.dtype]  # a storage that lives, its version, and as what it is seen


class Copy:
    """The memory of a tensor on the host."""

    def __init__(self, memory: Tensor, storage: StorageWeakRef, pinned: bool) -> None:
        self.device, self.storage = memory.device, storage  # while this lives no other storage has its key
        self.host = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=pinned)
        self.host.copy_(memory, non_blocking=pinned)
        self._back: weakref.ref[Tensor] | None = None

    def back(self) -> Tensor:
        """The memory on the device again."""
        here = self._back() if self._back is not None else None
        if here is None:
            here = torch.empty_like(self.host, device=self.device).copy_(self.host, non_blocking=True)
            self._back = weakref.ref(here)
        return here


class Place(NamedTuple):
    """A saved tensor: a view of a copy."""

    copy: Copy
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """A context: what operators save in it, parameters, integers and subclasses of tensors apart, goes to the host.

    A pass on the host itself copies too, which saves nothing.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.own = {p.untyped_storage()._cdata for p in model.parameters()}
        self.copies: weakref.WeakValueDictionary[Key, Copy] = weakref.WeakValueDictionary()
        super().__init__(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor | Place:
        if type(x) is not Tensor or not x.is_floating_point() or not x.numel():
            return x
        storage = x.untyped_storage()
        held = StorageWeakRef(storage)
        if storage._cdata in self.own:
            return x
        key = (storage._cdata, x._version, x.dtype)
        copy = self.copies.get(key)
        if copy is None:
            count = storage.nbytes() // x.element_size()
            memory = x.detach().as_strided((count,), (1,), 0)
            copy = self.copies[key] = Copy(memory, held, self.pinned)
        return Place(copy, x.shape, x.stride(), int(x.storage_offset()))

    @staticmethod
    def _unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return kept.copy.back().as_strided(kept.shape, kept.stride, kept.offset)
