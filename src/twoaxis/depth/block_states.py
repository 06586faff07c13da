"""What methods share that read the states of the last blocks: h(0) is the embeddings, h(l) what block l leaves.

state: {"sources": the block states that the next read sees, h(l) the newest}; inside a block also {"stream": x}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from twoaxis.depth.connection import Connection, DepthConfig, NamedStream, State
from twoaxis.depth.history import History, source_specs
from twoaxis.depth.trace import Trace
from twoaxis.errors import InputError
from twoaxis.tape import Array
from twoaxis.types import Context, Layout, TensorSpec


class StatesConfig(DepthConfig):
    """Options of such a method."""

    keeps_history = True

    def n_sources(self, depth: int) -> int:
        """The states seen by the read after `depth` blocks."""
        raise NotImplementedError

    def kept(self, layout: Layout, depth: int) -> int:
        """How many states the next read needs; after the last block, that block's own."""
        return self.n_sources(depth) if depth < layout.n_blocks else 1

    def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
        """The state after `depth` blocks."""
        index = range(depth + 1 - self.kept(layout, depth), depth + 1)
        return source_specs("sources", index, tensor, layout, carried=True)


class StatesConnection(Connection):
    """write: x + y, which is the block's state after its last sublayer. What `read` carries is x."""

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.opens, self.closes = index == 0, index == len(layout.blocks[block]) - 1
        self.kept = cfg.kept(layout, block + 1)

    def attach(self, name: str, shared: nn.Module | None, make: Callable[[], nn.Module]) -> None:
        """Set the module that it reads by: one of its own, or the network's, which the stream registers once."""
        if not self.cfg.shared:
            setattr(self, name, make())
        elif shared is not None:
            self.__dict__[name] = shared
        else:
            raise InputError(
                f"{self.cfg.name}(shared=True) is built for the whole network; use {type(self).__name__}.network"
            )

    def write(self, state: State, carry: Any, y: Tensor, ctx: Context) -> State:
        x, sources = carry + y.to(carry.dtype), state["sources"]
        if self.closes:
            return {"sources": sources.push(x, carried=True).last(self.kept)}
        return {"sources": sources, "stream": x}


class StatesStream(NamedStream):
    """Opens with the embeddings as h(0), closes with the final norm of h(L)."""

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"sources": History.empty(self.layout).push(x, 0, carried=True)}

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(state["sources"].sources[-1])


class StatesTrace(Trace):
    """The same in sizes alone."""

    cfg: Any

    def open(self, x: Array) -> State:
        return {"sources": self.sources().push(x, 0, carried=True)}  # type: ignore[arg-type]

    def write(self, state: State, carry: Any, y: Array, block: int, index: int) -> State:
        x = super().write(carry, None, y, block, index)
        if self.closes(block, index):
            kept = self.cfg.kept(self.layout, block + 1)
            return {"sources": state["sources"].push(x, block + 1, carried=True).last(kept)}
        return {"sources": state["sources"], "stream": x}

    def close(self, state: State) -> Array:
        return super().close(state["sources"].sources[-1])
