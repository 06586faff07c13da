"""A depth method in sizes alone: what its stream and its connections do, noted on a tape.

A method's trace has the four steps of the method itself, `open`, `read`, `write` and `close`, on arrays that
have sizes and no numbers. From it come the method's FLOPs, saved bytes, launches and bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree

from twoaxis.depth.history import History, unchanging
from twoaxis.depth.history_spec import parse_history
from twoaxis.tape import Array, Tape
from twoaxis.types import Layout, Reads

Core = Callable[..., Array]  # core(reads) -> y; core(reads, between, before) reaches inside attention


@dataclass(frozen=True)
class Sources(History):
    """A history of arrays: one that is rounded is noted on the tape."""

    tape: Tape | None = None

    def stored(self, source: Any) -> Any:
        assert self.tape is not None
        return self.tape.store(source, self.dtype)

    def made(self, sources: Any, index: tuple[int, ...], carried: bool) -> History:
        return Sources(sources, index, self.dtype, carried, tape=self.tape)


pytree.register_pytree_node(
    Sources,
    lambda sources: (list(sources.sources), None),
    lambda arrays, _: Sources(tuple(arrays)),
    serialized_type_name="twoaxis.depth.trace.Sources",
    flatten_with_keys_fn=lambda sources: (
        [(pytree.MappingKey(n), x) for n, x in zip(sources.names(), sources.sources, strict=True)],
        None,
    ),
)


class Trace:
    """The standard residual stream, and what other methods' traces change in it."""

    def __init__(self, cfg: Any, layout: Layout, tape: Tape) -> None:
        self.cfg, self.layout, self.t = cfg, layout, tape

    def sources(self) -> History:
        """The history before anything is pushed."""
        return Sources(dtype=parse_history(self.layout.history).dtype, tape=self.t)

    def unchanging(self, name: str) -> bool:
        """Whether a name in the state is one value at all depths, as `Stream.unchanging` says."""
        return unchanging(name)

    def open(self, x: Array) -> Any:
        """The first state, from embeddings."""
        return x

    def close(self, state: Any) -> Array:
        """What the head reads."""
        return self.t.norm(state)

    def read(self, state: Any, block: int, index: int) -> tuple[Any, Any]:
        """Reads and what the write needs of them."""
        return Reads(self.t.norm(state)), None  # type: ignore[arg-type]

    def write(self, state: Any, carry: Any, y: Array, block: int, index: int) -> Any:
        """The state after a sublayer."""
        return self.t.add(state, self.t.state(y))

    def sublayer(self, state: Any, core: Core, block: int, index: int) -> Any:
        """Read, core, write."""
        reads, carry = self.read(state, block, index)
        return self.write(state, carry, core(reads), block, index)

    def closes(self, block: int, index: int) -> bool:
        """Whether a sublayer is its block's last."""
        return index == len(self.layout.blocks[block]) - 1


def run(trace: Trace, x: Array, cores: Sequence[Sequence[Core]]) -> Array:
    """The whole network between embeddings and head; `cores[block][index]` note what the cores do."""
    t = trace.t
    with t.of("depth"):
        state = trace.open(x)
        for block, row in enumerate(cores):
            _note(trace, state)
            for index, core in enumerate(row):
                state = trace.sublayer(state, core, block, index)
        _note(trace, state)
        return trace.close(state)


def _note(trace: Trace, state: Any) -> None:
    """A boundary with this state."""
    leaves, _ = pytree.tree_flatten_with_path(state)
    names = [str(getattr(path[-1], "key", "")) if path else "" for path, _ in leaves]
    trace.t.boundary([x for _, x in leaves], [trace.unchanging(name) for name in names])
