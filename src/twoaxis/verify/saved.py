"""What autograd really keeps between the forward and the backward pass, in bytes."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from twoaxis.depth.stored import plain_parts
from twoaxis.model import Decoder, saving
from twoaxis.ops import choice


def saved_bytes(model: Decoder, tokens: Tensor, targets: Tensor, backend: str = "plain") -> int:
    """Every storage that a hook sees saved or an operator holds on its node, once; parameters left out.

    With recomputation also the inputs of blocks, cores or their halves that are still alive, which it needs, and
    with a history of "recompute" the embeddings. backend: of the operators; a configuration cannot know whether a
    machine has the native one.
    """
    own = {_place(p) for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
    inputs: list[weakref.ref[Tensor]] = []

    def keep(x: Tensor) -> Tensor:
        for part in plain_parts(x).values():
            if _place(part) not in own:
                kept.setdefault(_place(part), part.untyped_storage())
        return x

    def entered(part: Any, *args: Any, **options: Any) -> Any:
        inputs.extend(weakref.ref(x) for x in _tensors(pytree.tree_leaves(args)))
        return checkpoint(part, *args, **options)

    def opened(x: Tensor, ctx: Any) -> Any:
        inputs.append(weakref.ref(x))
        return run(x, ctx)

    run = model.stream.open
    checkpoint = saving.checkpoint  # of blocks, cores, or the halves of an attention
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    watched = patch.object(saving, "checkpoint", entered), patch.object(model.stream, "open", opened)
    with choice.requesting(backend), hooks, watched[0], watched[1]:
        loss = model.loss(tokens, targets)
    for node in _nodes(loss):
        for held in vars(node).values() if hasattr(node, "__dict__") else ():
            for x in _tensors(held):
                keep(x)
    if model.saving.recomputes or model.recomputes:
        for alive in inputs:
            if (block_input := alive()) is not None:
                keep(block_input)
    return sum(storage.nbytes() for storage in kept.values())


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph."""
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
            yield node


def _tensors(held: Any) -> Iterator[Tensor]:
    """The tensors in what an operator holds: containers and dataclasses of them."""
    if dataclasses.is_dataclass(held):
        held = [getattr(held, f.name) for f in dataclasses.fields(held)]
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, list | tuple | dict):
        for part in held.values() if isinstance(held, dict) else held:
            yield from _tensors(part)
