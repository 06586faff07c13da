"""The state at a block boundary: its tensors by name, and how to make the state of them again.

Nothing here knows a method. The structure comes from one run of the model on the meta device, where tensors
have a shape and no numbers; it is held to `Stream.state_spec`, from which costs are counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from twoaxis.depth import named_tensors
from twoaxis.depth.connection import Connection, State
from twoaxis.depth.reader import Reader, summed
from twoaxis.depth.stored import Stored
from twoaxis.errors import InputError
from twoaxis.model import Decoder, ModelConfig
from twoaxis.types import TensorSpec


@dataclass(frozen=True)
class Boundary:
    """The state after `depth` blocks. specs: its tensors, in the order of the pytree `tree`.

    pushed: whether sources are summed for their readers (`depth/reader.py`).
    """

    depth: int
    specs: dict[str, TensorSpec]
    tree: Any
    pushed: bool = False

    def pack(self, model: Decoder, state: State) -> dict[str, Tensor]:
        """The tensors of a state that the blocks of `model` have made."""
        named = named_tensors(as_values(push_form(model, state, self.depth) if self.pushed else state))
        assert list(named) == list(self.specs), (list(named), list(self.specs))
        return named

    def unpack(self, named: dict[str, Tensor]) -> State:
        """The state made of these tensors."""
        return pytree.tree_unflatten([named[name] for name in self.specs], self.tree)


def as_values(state: State) -> State:
    """The state with sources that are kept in fewer bits as the values that reads see, their gradients passed on.

    A later stage keeps them so: to round a rounded value again could change it.
    """
    if not any(isinstance(t, Stored) for t in pytree.tree_leaves(state)):
        return state
    return pytree.tree_map(lambda t: t * 1 if isinstance(t, Stored) else t, state)


def boundaries(cfg: ModelConfig, batch_size: int, seq_len: int) -> tuple[Decoder, list[Boundary], list[Any]]:
    """See `_boundaries`."""
    return _boundaries(cfg.to_json(), batch_size, seq_len)


@lru_cache(maxsize=4)
def _boundaries(text: str, batch_size: int, seq_len: int) -> tuple[Decoder, list[Boundary], list[Any]]:
    """A model without numbers, the boundary after 0, 1, .. L blocks, and the states there.

    Raises InputError where a method's states are not what its `state_spec` says.
    """
    cfg = ModelConfig.from_dict(json.loads(text))
    with torch.device("meta"), torch.no_grad():
        model = Decoder(cfg)
        tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
        states = model(tokens, return_states=True)[1]
    found, list_of_states = [], []
    for depth in range(cfg.n_blocks + 1):
        state = states[f"block.{depth}"]
        named, declared = named_tensors(state), model.stream.state_spec(depth, batch_size, seq_len)
        shapes = {name: tuple(t.shape) for name, t in named.items()}
        if shapes != {name: s.shape for name, s in declared.items()}:
            raise InputError(
                f"{cfg.depth}: the state after {depth} blocks is {shapes}, and its state_spec says "
                f"{ {n: s.shape for n, s in declared.items()} }; mend the method's state_spec"
            )
        tree = pytree.tree_flatten(state)[1]
        sent = {
            n: replace(declared[n], shape=tuple(t.shape)) for n, t in named_tensors(as_values(state)).items()
        }
        if cfg.layout().history != "full":
            sent = {n: TensorSpec(s.shape, cfg.state_dtype) for n, s in sent.items()}
        found.append(Boundary(depth, sent, tree))
        list_of_states.append(state)
    return model, found, list_of_states


def pushed_boundary(model: Decoder, pulled: Boundary, state: State) -> Boundary:
    """The push form of a boundary; `state` is the one there, on the meta device."""
    with torch.no_grad():
        other = push_form(model, state, pulled.depth)
    like = next(iter(pulled.specs.values())).dtype
    specs = {name: TensorSpec(tuple(t.shape), like) for name, t in named_tensors(other).items()}
    return Boundary(pulled.depth, specs, pytree.tree_flatten(other)[1], pushed=True)


def later_readers(model: Decoder, depth: int) -> list[tuple[str, Reader]]:
    """(name of the module, reader) of the reads after `depth` blocks."""
    connections = [
        (f"blocks.{b}.connections.{i}", c)
        for b, block in enumerate(model.blocks)
        for i, c in enumerate(block.connections)  # type: ignore[arg-type]
        if b >= depth
    ]
    modules: list[tuple[str, Connection | Any]] = [*connections, ("stream", model.stream)]
    return [(name, m) for name, m in modules if isinstance(m, Reader) and m.number is not None]


def push_form(model: Decoder, state: State, depth: int) -> State:
    """The state after `depth` blocks with its sources summed for the readers still to come."""
    readers = [reader for _, reader in later_readers(model, depth)]
    loose = model.stream.loose(depth)
    assert loose is not None
    return {**state, "sources": summed(state["sources"], readers, loose)}
