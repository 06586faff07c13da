"""What a tape notes: arrays, which are sizes, and the kernels that run on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Array:
    """An array of `numbers` entries of `itemsize` bytes; `width` of them for each token.

    base: what it is a view of. constant: no gradient reaches it. parameter: it is never counted as saved.
    held: the bytes of its memory where it is kept in fewer bits than it is computed in (`depth/stored.py`).
    """

    numbers: int
    width: int
    itemsize: int
    base: Array | None = None
    constant: bool = False
    parameter: bool = False
    held: int | None = None

    @property
    def root(self) -> Array:
        """The array that owns the memory."""
        return self if self.base is None else self.base.root

    @property
    def nbytes(self) -> int:
        """Bytes of the entries (of a view: its own)."""
        return self.grad_nbytes if self.held is None else self.held

    @property
    def grad_nbytes(self) -> int:
        """Bytes of its gradient, and of its value."""
        return self.numbers * self.itemsize

    def view(self, width: int | None = None) -> Array:
        """Part of the array, `width` numbers of each token, in the same memory."""
        width = self.width if width is None else width
        numbers = self.numbers // max(self.width, 1) * width
        held = None if self.held is None else self.held * numbers // self.numbers
        return Array(numbers, width, self.itemsize, self, self.constant, self.parameter, held)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step of the plain path.

    keep: what it saves for backward. held: what an operator holds besides, out of sight of hooks and not given
    up by recomputation. launches: of its forward pass. moved: bytes that these read and write;
    None is inputs and outputs once. native: it is this package's own, forward and backward one each; back_launches:
    of what runs around the second. product: a matrix product or attention over tokens: it writes its result,
    while others between two of them could be one kernel. rebuilt: what it keeps only where blocks are recomputed and
    `ops.rebuilt` cannot make it again; looped: what it keeps only elsewhere. back: FLOPs backward over FLOPs forward.
    piece: which of the pieces that a depth method calls of a core, all the tape's counted. gathers: in the decoder's
    loop its sources, inputs as large as its outputs, sum up their gradients once (`ops.pulled`), each reading so many
    times the gradients of the outputs; 0: it writes them itself. looks: its own backward pass reads the sources too.
    """

    name: str
    part: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    keep: tuple[Array, ...]
    flops: int = 0
    launches: int = 1
    product: bool = False
    moved: int | None = None
    back: int = 2
    held: tuple[Array, ...] = ()
    rebuilt: tuple[Array, ...] = ()
    looped: tuple[Array, ...] = ()
    native: bool = False
    back_launches: int = 1
    piece: int = 0
    gathers: float = 0.0
    looks: bool = False
