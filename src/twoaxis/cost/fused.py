"""The least traffic: kernels that could be one are one, and each array moves once.

Matrix products and attention over tokens are kernels of their own. All others between two of them (norms,
activations, depth reads and writes) are taken as one: it reads what was made outside it and writes what is
used outside it. Backward it reads the gradients of what it wrote and what it needs of the forward pass, and
writes the gradients of what it read; a gradient that other kernels add to is read and written again, except
by the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from twoaxis.tape import PASSING, Array, Kernel, Tape


@dataclass(frozen=True, slots=True)
class Fused:
    """One kernel at the limit, in its part of the model: FLOPs and bytes. product: runs on matrix units."""

    part: str
    product: bool
    flops_forward: int
    flops_backward: int
    bytes_forward: int
    bytes_backward: int


def fused(t: Tape) -> list[Fused]:
    """The kernels of a training step's passes, or of a decoding step's, at the limit."""
    every = groups(t.kernels)
    users: dict[Array, list[int]] = defaultdict(list)
    for number, group in enumerate(every):
        for root in {x.root for kernel in group for x in kernel.inputs}:
            users[root].append(number)
    ends = {x.root for _, state in t.boundaries[-1:] for x in state}
    held: dict[Array, object] = {}  # the sum so far of each array's gradient; equal ones are one
    made = [_limit(group, n, users, ends, held) for n, group in reversed(list(enumerate(every)))]
    return made[::-1]


def groups(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Kernels that are one at the limit."""
    found: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.product or not found or found[-1][0].product:
            found.append([])
        found[-1].append(kernel)
    return found


def _limit(
    group: list[Kernel],
    number: int,
    users: dict[Array, list[int]],
    ends: set[Array],
    held: dict[Array, object],
) -> Fused:
    made = {x.root for kernel in group for x in kernel.outputs}
    read = list(dict.fromkeys(x for kernel in group for x in kernel.inputs if x.root not in made))
    out = [x for x in made if any(user > number for user in users[x]) or x in ends]
    product = group[0].product
    forward = _bytes(read) + _bytes(out or group[-1].outputs[:1])
    stored = made.intersection(out)
    backward = sum(x.grad_nbytes for x in out) * (2 if product else 1) + _bytes(_needed(group, made - stored))
    written: dict[object, object] = {}
    for x, name in _gradients(group, read, stored).items():
        part_of = held.get(x), name
        if part_of not in written:
            written[part_of] = object()
            backward += x.grad_nbytes * (2 if x in held else 1)
        held[x] = written[part_of]
    part = next((k.part for k in group if k.part == "depth"), group[0].part)
    flops = sum(kernel.flops for kernel in group)
    back = sum(kernel.flops * kernel.back for kernel in group)
    return Fused(part, product, flops, back, forward, backward)


def _needed(group: list[Kernel], lost: set[Array]) -> set[Array]:
    """What is kept and stored, and of what is kept and lost what it is made from again."""
    needed: set[Array] = set()
    again: set[Array] = set()
    for kernel in reversed(group):
        remade = again.intersection(x.root for x in kernel.outputs)
        for x in (*kernel.keep, *(kernel.inputs if remade else ())):
            (again if x.root in lost else needed).add(x.root if x.root in lost else x)
    return needed


def _gradients(group: list[Kernel], read: list[Array], stored: set[Array]) -> dict[Array, object]:
    """What is read and has a gradient, with that gradient's name: arrays that are only summed share one."""
    names: dict[Array, object] = {}
    for kernel in reversed(group):
        made = kernel.outputs[0]
        name = made if made in stored else names.get(made, made)
        for x in kernel.inputs:
            names[x] = x if kernel.name not in PASSING or x in names else name
    return {x: names[x] for x in read if not x.constant}


def _bytes(arrays: Sequence[Array] | set[Array]) -> int:
    return sum(x.nbytes for x in arrays)
