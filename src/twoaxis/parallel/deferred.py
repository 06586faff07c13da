"""A model built without numbers, which are drawn later: only those wanted, and exactly those of a model built at once.

What building does to tensors is noted instead of done. `Blank.draw` does it again, in order: a step that a wanted
tensor depends on for real, one that draws random numbers for others into memory that is dropped at once, so that the
stream of random numbers stays the same; the rest not at all. Each tensor is handed out after its last step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from twoaxis.model import Decoder, ModelConfig

OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "eye"}  # whatever was there before
Memory = int  # the storage of tensors that share it


class Step:
    """One operation: what it was given, and which memory it reads and writes."""

    def __init__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.func, self.args, self.kwargs, self.out = func, args, kwargs, out
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        changed = [given[a.name] for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        self.changed = [t for t in changed if isinstance(t, Tensor)]
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.reads = {memory(t) for t in tree_leaves((args, kwargs)) if _blank(t)}
        self.made = [t for t in tree_leaves(out) if _blank(t) and memory(t) not in self.reads]
        self.writes = {memory(t) for t in (*self.changed, *self.made)}
        whole = all(t.numel() * t.element_size() == t.untyped_storage().nbytes() for t in self.changed)
        name = func._schema.name.removeprefix("aten::")
        if not self.changed or (whole and name in OVERWRITES):
            self.fresh, self.reads = self.writes, self.reads - self.writes
        else:
            self.fresh = set()  # it changes what was there

    def run(self, real: dict[Memory, Tensor]) -> None:
        """Do it, in `real` memory."""

        def here(t: Tensor) -> Tensor:
            if not t.is_meta:
                return t
            if memory(t) not in real:
                size = t.untyped_storage().nbytes() // t.element_size()
                real[memory(t)] = torch.empty(size, dtype=t.dtype)
            return real[memory(t)].as_strided(t.shape, t.stride(), t.storage_offset())

        args, kwargs = tree_map_only(Tensor, here, (self.args, self.kwargs))
        out = self.func(*args, **kwargs)
        for told, made in zip(tree_leaves(self.out), tree_leaves(out), strict=True):
            if any(told is t for t in self.made):
                assert told.stride() == made.stride()
                size = made.untyped_storage().nbytes() // made.element_size()
                real[memory(told)] = made.as_strided((size,), (1,), 0)


class Noting(TorchDispatchMode):
    """A context in which tensors are made and changed without memory, and what was done is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on the meta device, unless it needs nothing but small tensors that are there (constants)."""
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        if given and not random and not any(t.is_meta for t in given):
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda t: t if t.is_meta else t.detach().clone(), (args, kwargs))
        sizes, named = tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), (args, kwargs))
        if any(a.name == "device" for a in func._schema.arguments):
            named, kwargs = ({**k, "device": torch.device(d)} for k, d in ((named, "meta"), (kwargs, "cpu")))
        out = func(*sizes, **named)
        self.steps.append(Step(func, args, kwargs, out))
        return out


class Blank:
    """A model of `cfg` on the meta device, and how its numbers come about.

    names: the parameters, and then the buffers, of the whole model.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        with Noting() as noted:
            self.model = Decoder(cfg)
        self.steps = noted.steps
        self.constants: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            self.tensors[name] = tensor.detach()
            if not tensor.is_meta:
                self.constants[name] = tensor.detach().clone()
        self.buffers = frozenset(name for name, _ in self.model.named_buffers())
        self.model._apply(lambda t: t.to("meta"))

    @torch.no_grad()
    def draw(self, wanted: Collection[str], deliver: Callable[[str, Tensor], None], stream: bool) -> None:
        """Hand out the wanted tensors, each whole, one after another. stream: draw what others would, too."""
        names = {memory(t): n for n, t in self.tensors.items() if n in wanted and n not in self.constants}
        done = self._needed(set(names))
        stream = stream or any(step.random for step in done)
        last = {m: step for step in done for m in (*step.reads, *step.writes)}
        real: dict[Memory, Tensor] = {}
        for step in self.steps:
            if step in done:
                step.run(real)
            elif step.random and stream:
                step.run({})
            for key in [k for k in real if last[k] is step]:
                flat = real.pop(key)
                if key in names:
                    told = self.tensors[names[key]]
                    deliver(names[key], flat.as_strided(told.shape, told.stride(), told.storage_offset()))
        for name in (n for n in self.constants if n in wanted):
            deliver(name, self.constants[name])

    def _needed(self, memories: set[Memory]) -> dict[Step, None]:
        """The steps that what lies there in the end depends on, in order."""
        found = []
        for step in reversed(self.steps):
            if step.writes & memories:
                found.append(step)
                memories = (memories - step.fresh) | step.reads
        return dict.fromkeys(reversed(found))


def memory(tensor: Tensor) -> Memory:
    """Which memory a tensor that is kept alive lies in."""
    return int(tensor.untyped_storage()._cdata)


def _blank(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
