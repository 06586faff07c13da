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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .choice import transformed

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
    """States that follow from one another. stride: one in so many is kept; again: those rebuilt, by number, as long
    as a backward pass may ask; length: how many writes there are."""

    stride: int = STRIDE
    again: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0


@dataclass(eq=False)
class Place:
    """One state of a chain, as an operator keeps it in place of the state: itself, or a step from the one before.

    Places hold those before them down to a kept one, and nothing holds a place but operators and the place after, so
    that memory is given up while a backward pass goes down."""

    chain: Chain
    number: int
    before: Place | None = None
    step: Step | None = None
    kept: Tensor | None = None
    version: int = 0

    def keep(self, state: Tensor) -> None:
        """Keep the state; no copy is made."""
        self.kept, self.version, self.before, self.step = state.detach(), state._version, None, None

    def state(self) -> Tensor:
        """The state itself, rebuilt if it is not kept; later rebuilt ones are given up."""
        again = self.chain.again
        for later in [i for i in again if i > self.number]:
            del again[later]
        place, steps = self, []
        while place.kept is None and place.number not in again:
            assert place.before is not None
            assert place.step is not None
            steps.append(place.step)
            place = place.before
        if place.kept is not None:
            _unchanged((place.kept,), (place.version,))
        x = again[place.number] if place.kept is None else place.kept
        with torch.no_grad():
            for number, step in enumerate(reversed(steps), place.number + 1):
                x = again[number] = step(x)
        return x


def state_of(ctx: Any) -> Tensor:
    """The state at `ctx.place`, in the backward of an operator: given up with its saved tensors, as autograd does."""
    state: Tensor = ctx.place.state()
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.place = None
    return state


class Loop:
    """A pass through all layers: knows the newest state, unchanged since, and where it stands.

    queries: of reads over depth, with their key gains, in any order: see `known_read`. weights: of mixes, as
    parameters and by whether a softmax makes them: see `known_mix`. gates: of gated reads, weights, gate and its gain:
    see `known_gates`."""

    def __init__(
        self,
        queries: Sequence[tuple[Tensor, Tensor | None]] = (),
        weights: Sequence[tuple[Tensor, bool]] = (),
        gates: Sequence[tuple[Tensor, Tensor, Tensor | None]] = (),
    ) -> None:
        self.newest: Tensor | None = None
        self.version = 0
        self.place = Place(Chain(), 0)
        self.sources: dict[int, Any] = {}  # of reads over depth, by identity: see `pulled`
        self.newest_source: Tensor | None = None  # as reads take it
        self.queries, self.weights, self.gates = queries, weights, gates
        self.known: Any = None
        self.mixes: Any = None
        self.gated: Any = None
        self.hooks = _hooks()

    def place_of(self, state: Tensor, stride: int = STRIDE) -> Place:
        """Where a state stands. One that no write of this loop has made begins a chain, which keeps it.

        stride: of the states in that chain, one in so many is kept."""
        if state is not self.newest or state._version != self.version:
            self.stand(state, Place(Chain(stride), 0))
        if self.place.number % self.place.chain.stride == 0 and self.place.kept is None:
            self.place.keep(state)
        return self.place

    def grow(
        self, place: Place, run: Callable[..., Tensor], given: tuple[Tensor, ...], state: Tensor
    ) -> None:
        """A write has made `state`, `run(the one at place, *given)`."""
        chain = place.chain
        if (
            not state.requires_grad or chain.length != place.number
        ):  # nothing before it asks, or another write has
            return  # the state will begin a chain
        chain.length += 1
        self.stand(state, Place(chain, chain.length, place, Step(run, given)))

    def stand(self, state: Tensor, place: Place) -> None:
        """The newest state, at this place."""
        self.newest, self.version, self.place = state, state._version, place


@contextmanager
def loop(
    open_: bool,
    queries: Callable[[], Sequence[tuple[Tensor, Tensor | None]]] = tuple,
    weights: Callable[[], Sequence[tuple[Tensor, bool]]] = tuple,
    gates: Callable[[], Sequence[tuple[Tensor, Tensor, Tensor | None]]] = tuple,
) -> Iterator[None]:
    """Operators inside may rebuild their states, if `open_` and gradients are recorded outside of torch.compile.

    queries, weights, gates: those of reads over depth and of mixes that are parameters, asked for if it is used."""
    usable = open_ and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if torch.compiler.is_compiling():
        yield
        return
    token = _open.set(Loop(queries(), weights(), gates()) if usable else None)
    try:
        yield
    finally:
        _open.reset(token)


def current() -> Loop | None:
    """The loop that is open here, if gradients are recorded and what is saved goes where the loop's own goes.

    Other hooks on saved tensors than at its beginning are those of a part that is recomputed by itself."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    found = _open.get()
    return None if found is None or _hooks() != found.hooks or transformed() else found


def _hooks() -> Any:
    """The hooks that tensors saved for backward pass through here, None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _unchanged(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    if any(x._version != version for x, version in zip(tensors, versions, strict=True)):
        raise RuntimeError(
            "a state or a branch output was changed in place before backward rebuilt the states"
        )
