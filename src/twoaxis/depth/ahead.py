"""A write and what the next sublayer reads of its result, in one pass over memory.

    x' = x + y,       h = norm'(x')                    norm' and take' are the next sublayer's, which the connection
    X' = M X + b y,   z, gates, h = take'(X')          that writes does not know

The decoder knows the order of its connections and opens `loop` around its layers. A write inside asks for the one that
follows its own; what it makes ahead is taken by that one if it meets this very state by these very parameters, all of
them unchanged, and else forgotten.
So nothing pends in a method: outside of a loop, in a pipeline's stage or under torch.compile both run one by one, and
under torch.inference_mode, whose tensors do not tell whether they were changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.norm import RMSNorm
from twoaxis.ops.native.few_tokens import folds
from twoaxis.ops.native.stream_pass import Made, Taking
from twoaxis.ops.precision import cast
from twoaxis.ops.stream_pass import write_after
from twoaxis.ops.stream_take import Taken

if TYPE_CHECKING:
    from twoaxis.depth.connection import Connection

_open: ContextVar[Loop | None] = ContextVar("ahead", default=None)


Reader = RMSNorm | Taking


class Ahead(NamedTuple):
    """What was made of a state for its reader, a norm or the taking of a connection, together with it.

    of: the state and the reader's parameters; versions: theirs, at that time."""

    reader: Reader
    of: tuple[Tensor | None, ...]
    versions: list[int]
    made: Any

    def fits(self, reader: Reader, state: Tensor) -> bool:
        """Whether the reader would make just this, of this state."""
        if self.of[0] is not state or not _alike(self.reader, reader):
            return False
        now = _of(reader, state)
        return all(a is b for a, b in zip(self.of, now, strict=True)) and self.versions == _versions(now)


def _alike(a: Reader, b: Reader) -> bool:
    return a is b if isinstance(a, RMSNorm) or isinstance(b, RMSNorm) else a.options == b.options


def _of(reader: Reader, state: Tensor) -> tuple[Tensor | None, ...]:
    return (state, reader.weight) if isinstance(reader, RMSNorm) else (state, *reader.learned)


def _versions(tensors: tuple[Tensor | None, ...]) -> list[int]:
    return [x._version for x in tensors if x is not None]


class Loop:
    """The norm or connection that comes after each, and what is made ahead."""

    def __init__(self, norms: Sequence[RMSNorm | None], connections: Sequence[Connection]) -> None:
        self.following = {a: b for a, b in pairwise(norms) if a is not None and folds(b)}
        self.next = dict(pairwise(connections))
        self.ahead: Ahead | None = None

    def make(self, reader: Reader, state: Tensor, made: Any) -> None:
        of = _of(reader, state)
        if not any(x is not None and x.is_inference() for x in of):  # a model built there has no versions
            self.ahead = Ahead(reader, of, _versions(of), made)

    def take(self, reader: Reader, state: Tensor) -> Any:
        """What was made for this reader of this very state, or None; asked for once."""
        found, self.ahead = self.ahead, None
        return found.made if found is not None and found.fits(reader, state) else None


@contextmanager
def loop(norms: Sequence[RMSNorm | None], connections: Sequence[Connection] = ()) -> Iterator[None]:
    """Writes inside know what follows; norms: of all reads in their order, None where there is none, with the final
    one; connections: all in their order."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # whose tensors have no versions
        yield
        return
    token = _open.set(Loop(norms, connections))
    try:
        yield
    finally:
        _open.reset(token)


def _current() -> Loop | None:
    return None if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() else _open.get()


def add(norm: RMSNorm, x: Tensor, y: Tensor) -> Tensor:
    """x + y in x's dtype, (..., d) each, by the connection that has read x through `norm`."""
    found = _current()
    following = None if found is None else found.following.get(norm)
    if found is None or following is None:
        return x + cast(y, x.dtype)
    total, normed = following.after_adding(x, y)
    found.make(following, total, normed)
    return total


def normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """norm(x), or what was made ahead of it."""
    found = _current()
    ahead = None if found is None else found.take(norm, x)
    result: Tensor = norm(x) if ahead is None else ahead
    return result


def write(connection: Connection, taken: Taken, state: Tensor, y: Tensor) -> Tensor:
    """The streams (..., n, d) after a sublayer that has `taken` of them, by its connection."""
    found = _current()
    following = None if found is None else found.next.get(connection)
    then = None if following is None else following.taking(state.shape[-2])
    written, made = write_after(taken, state, y, then)
    if found is not None and then is not None and made is not None:
        found.make(then, written, made)
    return written


def made(taking: Taking, state: Tensor) -> Made | None:
    """What was made ahead of `take` by the same parameters and options."""
    found = _current()
    result: Made | None = None if found is None else found.take(taking, state)
    return result
