"""States that are made again in backward: of a stack of writes one state in a few is kept, the rest are rebuilt.

    X_0 -> X_1 -> .. -> X_n,   X_{i+1} = step_i(X_i),   a step keeps what it was given beside the state

Rank-one updates could be taken back (X_i = X_{i+1} - h c^T), but a difference of large states loses a small one's
digits, and a bfloat16 state loses more at every step. So states are rebuilt forwards, from the last one kept before
them and by the very code that made them: to the bit, for every gate, in every dtype. A backward pass asks for them in
falling order and makes each of them once; any other order, a second pass or a pass through a part of the stack works
too and makes them again. At most a stride of rebuilt states live at a time.

This needs to know that a state came out of a write and that nothing else recomputes it, so it is used only inside
`loop`, which the decoder opens around all its layers in an eager pass with gradients and without checkpointing.
Elsewhere operators keep their states themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

STRIDE = 8  # of 96 states twelve are kept and eight rebuilt at a time: about the least in all
_open: ContextVar[Loop | None] = ContextVar("open_loop", default=None)


@dataclass(eq=False)
class Step:
    """How the next state was made: `run(state, *given)`."""

    run: Callable[..., Tensor]
    given: tuple[Tensor, ...]
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.given = tuple(x.detach() for x in self.given)
        self.versions = tuple(x._version for x in self.given)

    def __call__(self, state: Tensor) -> Tensor:
        _unchanged(self.given, self.versions)
        return self.run(state, *self.given)


@dataclass(eq=False)
class Chain:
    """States that follow from one another. kept: some by number; steps: from each to the next."""

    kept: dict[int, Tensor] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    stride: int = STRIDE
    again: dict[int, Tensor] = field(default_factory=dict)  # rebuilt, as long as a backward pass may ask

    def keep(self, number: int, state: Tensor) -> None:
        """Keep a state; no copy is made."""
        self.kept[number], self.versions[number] = state.detach(), state._version

    def state(self, number: int) -> Tensor:
        """A state by number, rebuilt if it is not kept; later rebuilt ones are given up."""
        for later in [i for i in self.again if i > number]:
            del self.again[later]
        start = max(i for i in (*self.kept, *self.again) if i <= number)
        if start in self.kept:
            _unchanged((self.kept[start],), (self.versions[start],))
        x = self.kept[start] if start in self.kept else self.again[start]
        with torch.no_grad():
            for i in range(start, number):
                x = self.again[i + 1] = self.steps[i](x)
        return x


@dataclass(eq=False)
class Place:
    """One state of a chain, as an operator keeps it in place of the state."""

    chain: Chain
    number: int

    @property
    def state(self) -> Tensor:
        """The state itself."""
        return self.chain.state(self.number)


class Loop:
    """A pass through all layers: knows the newest state and where it stands."""

    def __init__(self) -> None:
        self.newest: Tensor | None = None
        self.place = Place(Chain(), 0)
        self.sources: dict[int, Any] = {}  # of reads over depth, by identity: see `pulled`

    def place_of(self, state: Tensor, stride: int = STRIDE) -> Place:
        """Where a state stands. One that no write of this loop has made begins a chain, which keeps it.

        stride: of the states in that chain, one in so many is kept."""
        if state is not self.newest:
            self._begin(state, stride)
        chain, number = self.place.chain, self.place.number
        if number % chain.stride == 0 and number not in chain.kept:
            chain.keep(number, state)
        return self.place

    def grow(self, place: Place, step: Step, state: Tensor) -> None:
        """A write has made `state` from the one at `place`."""
        chain, number = place.chain, place.number + 1
        if len(chain.steps) != place.number:  # another write from the same state
            return self._begin(state, chain.stride)
        chain.steps.append(step)
        self.newest, self.place = state, Place(chain, number)
        return None

    def _begin(self, state: Tensor, stride: int) -> None:
        self.newest, self.place = state, Place(Chain(stride=stride), 0)


@contextmanager
def loop(open_: bool) -> Iterator[None]:
    """Operators inside may rebuild their states, if `open_` and gradients are recorded outside of torch.compile."""
    usable = open_ and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if torch.compiler.is_compiling():
        yield
        return
    token = _open.set(Loop() if usable else None)
    try:
        yield
    finally:
        _open.reset(token)


def current() -> Loop | None:
    """The loop that is open here, if gradients are recorded."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    return _open.get()


def _unchanged(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    if any(x._version != version for x, version in zip(tensors, versions, strict=True)):
        raise RuntimeError(
            "a state or a branch output was changed in place before backward rebuilt the states"
        )
