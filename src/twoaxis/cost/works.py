"""What a device is given to do: kernels as FLOPs, bytes and launches, forward and backward, from a pass's tape.

eager   each step of the plain path is a kernel, or several, as torch runs it
native  the same, but where an operator of ours has a kernel for CPUs, forward and backward are one each
fused   what lies between two matrix products is one kernel that moves each array once: the limit of a compiler
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twoaxis.cost.fused import fused, groups
from twoaxis.tape import PASSING, Array, Kernel, Tape

Execution = Literal["eager", "native", "fused"]
NONLINEAR = ("softmax", "log_softmax", "silu", "gelu", "sigmoid", "tanh")
BATCHED = ("matmul", "stream_read", "stream_mix", "stream_write")  # a small matrix for each token
ATTENTION = ("sdpa", "native attention")
OVER_TOKENS = (*ATTENTION, "blocked", "attention")  # the last in decoding
AGAIN = (*ATTENTION, "silu", "swiglu", "gelu")  # whose backward pass takes their exponentials again


@dataclass(frozen=True, slots=True)
class Work:
    """One step: FLOPs, bytes moved by `launches` kernels, exponentials, and whether it runs on matrix units.

    batched: it multiplies a small matrix for each token. native: it is a kernel of this package for CPUs.
    attends: it reads the keys and values of tokens.
    """

    part: str
    product: bool
    flops: int
    nbytes: int
    launches: int
    exponentials: float = 0.0
    batched: bool = False
    native: bool = False
    attends: bool = False


def works(t: Tape, execution: Execution) -> tuple[list[Work], list[Work]]:
    """(forward, backward) of a tape of that backend; a network that runs again does so in its backward pass."""
    if execution == "fused":
        forward, backward = _fused(t)
        again = forward[: len(groups(t.kernels[: t.again[1]]))] if t.again else []
    else:
        forward, backward = [_forward(kernel) for kernel in t.kernels], _backward(t)
        again = forward[slice(*t.again)] if t.again else []
    return forward, [*again, *backward]


def _fused(t: Tape) -> tuple[list[Work], list[Work]]:
    found = fused(t)
    over = [any(k.name in OVER_TOKENS for k in group) for group in groups(t.kernels)]
    forward = [
        Work(f.part, f.product, f.flops_forward, f.bytes_forward, 1, attends=a)
        for f, a in zip(found, over, strict=True)
    ]
    backward = [Work(f.part, f.product, f.flops_backward, f.bytes_backward, 1 + f.product) for f in found]
    return forward, backward


def _forward(kernel: Kernel) -> Work:
    moved = kernel.moved
    if moved is None:
        moved = _bytes(kernel.inputs) + _bytes(kernel.outputs)
    return Work(
        kernel.part,
        kernel.product,
        kernel.flops,
        moved,
        kernel.launches,
        _exponentials(kernel),
        kernel.name in BATCHED,
        kernel.native,
        kernel.name in OVER_TOKENS,
    )


def _backward(t: Tape) -> list[Work]:
    """Autograd: a kernel reads its result's gradient and what it kept and writes a gradient for each input that
    has one; an addition passes its gradient on; the second and later gradients of an array are added to it. Sources
    that gather theirs write it once and read themselves and the gradients of what saw them."""
    found, reached, gathered = [], set[Array](), set[Array]()
    for kernel in reversed(t.kernels):
        inputs = [x for x in kernel.inputs if not x.constant]
        launches, moved = _differentiated(kernel, inputs)
        if kernel.gathers:
            sources = [x for x in inputs if x.numbers == kernel.outputs[0].numbers]
            others = [x for x in inputs if x not in sources]
            fresh = [x for x in sources if x not in gathered]
            gathered.update(fresh)
            grads = sum(x.grad_nbytes for x in kernel.outputs)
            kept = [x for x in kernel.keep if kernel.looks or x not in sources]
            moved = grads + _bytes(kept) + _gradients(others) + int(kernel.gathers * len(sources) * grads)
            launches, moved = launches + len(fresh), moved + 2 * _gradients(fresh)
            inputs = [*others, *fresh]
        for x in inputs:
            if x in reached:
                launches, moved = launches + 1, moved + 3 * x.grad_nbytes
            reached.add(x)
        exponentials = _exponentials(kernel) if kernel.name in AGAIN else 0.0
        batched, flops = kernel.name in BATCHED, kernel.flops * kernel.back
        found.append(
            Work(kernel.part, kernel.product, flops, moved, launches, exponentials, batched, kernel.native)
        )
    return found


def _differentiated(kernel: Kernel, inputs: list[Array]) -> tuple[int, int]:
    """(launches, bytes) of a kernel's own backward pass, to the gradients of these inputs."""
    if not inputs or kernel.name in PASSING:
        return 0, 0
    launches = len(inputs) if kernel.product else min(len(inputs), kernel.launches)
    reads = 1 if kernel.native else launches  # of its result's gradient
    moved = _gradients(kernel.outputs[:1]) * reads + _bytes(kernel.keep) + _gradients(inputs)
    return kernel.back_launches if kernel.native else launches, moved


def _exponentials(kernel: Kernel) -> float:
    """Of attention over tokens, one a visible pair and head: FLOPs are 4 D of each; and of softmaxes."""
    if kernel.name in ATTENTION:
        y, lse = kernel.outputs[:2]  # (B, T, H D), (B, H, T)
        return kernel.flops / (4 * y.numbers / lse.numbers)
    return (
        float(kernel.inputs[0].numbers)
        if kernel.name in ("softmax", "log_softmax", "token_loss") and kernel.inputs
        else 0.0
    )


def _bytes(arrays: tuple[Array, ...] | list[Array]) -> int:
    return sum(x.nbytes for x in arrays)


def _gradients(arrays: tuple[Array, ...] | list[Array]) -> int:
    return sum(x.grad_nbytes for x in arrays)
