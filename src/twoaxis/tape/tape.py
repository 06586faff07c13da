"""A forward pass as a list of kernels: how they are noted, and what torch's own operations note."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from twoaxis.tape.arrays import Array, Kernel

STORING = {
    "int8": 8,
    "bfloat16": 1,
    "float16": 1,
}  # kernels that round: largest, scale, division, rounding, ..
PASSING = ("add", "value", "store")  # kernels whose gradient is that of their result
Backend = Literal["plain", "native"]


@dataclass
class Tape:
    """A forward pass over `batch_size` rows of `seq_len` tokens, or, decoding, over their last tokens alone.

    backend: of the operators, "plain" or "native", which has kernels of its own for some calls (`ops/choice.py`).
    itemsize: of activations and weights. state_itemsize: of the residual state. again: the kernels (from, to) that
    the backward pass begins by running once more, of which nothing but their input, `entry`, is kept.
    """

    batch_size: int
    seq_len: int
    decoding: bool = False
    itemsize: int = 4
    state_itemsize: int = 4
    part: str = ""
    kernels: list[Kernel] = field(default_factory=list)
    boundaries: list[tuple[int, tuple[Array, ...]]] = field(default_factory=list)
    lasting: list[tuple[bool, ...]] = field(default_factory=list)
    again: tuple[int, int] | None = None
    entry: Array | None = None
    scaled: set[Array] = field(default_factory=set)  # sources whose norms known reads have made
    backend: Backend = "plain"
    pieces: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.batch_size * (1 if self.decoding else self.seq_len)

    @property
    def wide(self) -> int:
        """Bytes of a number that is computed in at least float32."""
        return max(4, self.itemsize, self.state_itemsize)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Kernels inside belong to a part of the model."""
        before, self.part = self.part, part
        yield
        self.part = before

    def array(self, width: int, itemsize: int | None = None, constant: bool = False) -> Array:
        """A new array of `width` numbers per token."""
        return Array(self.tokens * width, width, itemsize or self.itemsize, constant=constant)

    def table(self, numbers: int, itemsize: int | None = None, constant: bool = False) -> Array:
        """A new array that does not grow with the tokens."""
        return Array(numbers, numbers, itemsize or self.itemsize, constant=constant)

    def weight(self, numbers: int) -> Array:
        """A parameter."""
        return Array(numbers, numbers, self.itemsize, parameter=True)

    def run(
        self,
        name: str,
        inputs: Sequence[Array],
        *outputs: Array,
        keep: Sequence[Array] = (),
        flops: int = 0,
        **more: Any,
    ) -> Array:
        """Note a `Kernel`; returns its first output. What is kept in fewer bits is first turned into its value."""
        inputs = [self._value(x) for x in inputs]
        more["piece"] = self.pieces
        self.kernels.append(Kernel(name, self.part, tuple(inputs), outputs, tuple(keep), flops, **more))
        return outputs[0]

    def store(self, x: Array, dtype: str) -> Array:
        """x kept as `dtype`, with a number per token for int8; x itself for "full"."""
        if dtype == "full":
            return x
        scales = self.tokens * max(4, x.itemsize) if dtype == "int8" else 0
        held = x.numbers * (1 if dtype == "int8" else 2) + scales
        kept = Array(x.numbers, x.width, x.itemsize, held=held)
        self.kernels.append(
            Kernel(
                "store",
                self.part,
                (x,),
                (kept,),
                (),
                launches=STORING[dtype],
                moved=x.nbytes + held,
                piece=self.pieces,
            )
        )
        return kept

    def _value(self, x: Array) -> Array:
        """What is computed with: x, or the value of what is kept in fewer bits."""
        if x.held is None:
            return x
        value = self.like(x)
        self.kernels.append(Kernel("value", self.part, (x,), (value,), (), piece=self.pieces))
        return value

    def like(self, x: Array) -> Array:
        """A new array as `x` is."""
        return Array(x.numbers, x.width, x.itemsize)

    def cast(self, x: Array, itemsize: int) -> Array:
        """x in another dtype; itself where it has that size."""
        if x.itemsize == itemsize:
            return x
        return self.run("cast", (x,), Array(x.numbers, x.width, itemsize))

    def state(self, x: Array) -> Array:
        """x in the dtype of the residual state."""
        return self.cast(x, self.state_itemsize)

    def add(self, *xs: Array) -> Array:
        """The sum of arrays, one kernel for each `+`."""
        total = xs[0]
        for x in xs[1:]:
            total = self.run("add", (total, x), self.like(total))
        return total

    def times(self, x: Array, y: Array) -> Array:
        """x * y, as large as the larger: each is kept if the other one has a gradient."""
        keep = [a for a, b in ((x, y), (y, x)) if not b.constant]
        return self.run("mul", (x, y), self.like(x if x.numbers >= y.numbers else y), keep=keep)

    def map(self, name: str, x: Array, keep: str = "input") -> Array:
        """A function of each number that keeps its "input", its "output", or "nothing"."""
        y = self.like(x)
        return self.run(name, (x,), y, keep={"input": (x,), "output": (y,), "nothing": ()}[keep])

    def linear(
        self, x: Array, out: int, bias: bool = False, of: int | None = None, weight: Array | None = None
    ) -> Array:
        """W x, of each `of` numbers of x (all of a token's) `out`; W is a parameter, or made: a `weight`."""
        of = x.width if of is None else of
        W = self.weight(of * out + bias * out) if weight is None else weight
        y = Array(x.numbers // of * out, x.width // of * out, x.itemsize)
        flops = 2 * x.numbers * out
        return self.run("linear", (x, W), y, keep=(x, W), flops=flops, product=True, back=_gradients(x, W))

    def matmul(self, weights: Array, x: Array, rows: int, d: int, plus: Array | None = None) -> Array:
        """Each token's small matrix, or one for all tokens, times its rows of d numbers; `rows` rows come out."""
        keep = [a for a, b in ((weights, x), (x, weights)) if not b.constant]
        inputs = (weights, x) if plus is None else (weights, x, plus)
        flops = 2 * self.tokens * weights.width * d
        made = self.array(rows * d, x.itemsize)
        return self.run("matmul", inputs, made, keep=keep, flops=flops, back=_gradients(weights, x))

    def norm(self, x: Array, gain: bool = True, groups: int = 1) -> Array:
        """An RMSNorm as torch composes it: square, mean, + eps, root, division, and the gain. groups: heads.

        With a gain it has a kernel of ours, which keeps its input and a float32 factor, nothing divided.
        """
        factor = self.array(x.numbers // x.width // self.tokens * groups, max(4, x.itemsize))
        covered = self.backend == "native" and x.held is None and x.itemsize in (2, 4)
        if gain and covered and not self.decoding:
            weight, about = self.weight(x.width // groups), {"native": True, "back_launches": 3}
            return self.run("norm", (x, weight), self.like(x), factor, keep=(x, weight, factor), **about)
        moved = 5 * x.nbytes + 4 * factor.nbytes
        normed = self.run("norm", (x,), self.like(x), factor, keep=(x, factor), launches=5, moved=moved)
        return self.times(normed, self.weight(x.width // groups)) if gain else normed

    def layer_norm(self, x: Array, groups: int = 1) -> Array:
        """A LayerNorm without parameters; x, means and factors are kept. groups: vectors normed in a token."""
        means, factors = (self.array(groups, x.itemsize) for _ in range(2))
        return self.run("layer_norm", (x,), self.like(x), means, factors, keep=(x, means, factors))

    def dropout(self, x: Array, rate: float) -> Array:
        """Dropout in training: a random array, scaled, is kept."""
        if not rate or self.decoding:
            return x
        noise = self.like(x)
        return self.run("dropout", (x,), self.like(x), noise, keep=(noise,), launches=3)

    def split(self) -> None:
        """Here a depth method's call of one piece of a core ends, or that of another begins."""
        self.pieces += 1

    def boundary(self, state: Sequence[Array], lasting: Sequence[bool]) -> None:
        """A block begins (or the last one ended) with this state. lasting: whose name is one value at all depths."""
        self.boundaries.append((len(self.kernels), tuple(state)))
        self.lasting.append(tuple(lasting))

    def saved(self, start: int = 0, stop: int | None = None, alone: bool = False) -> dict[Array, str]:
        """What kernels start..stop-1 keep for backward, every array once, with the part that keeps it first.

        alone: as a block that is recomputed runs them."""
        kept: dict[Array, str] = {}
        for kernel in self.kernels[start:stop]:
            for x in (*kernel.keep, *kernel.held, *(kernel.rebuilt if alone else kernel.looped)):
                if not x.root.parameter:
                    kept.setdefault(x.root, kernel.part)
        return kept


def _gradients(*xs: Array) -> int:
    """How many of these arrays have one."""
    return sum(not x.constant for x in xs)
