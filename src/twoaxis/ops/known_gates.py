"""Reads of DeepCrossAttention by gates that are known when the loop over all layers opens: backward reads no source.

Of g_o = sum_i (b_oi + relu(s_oi)) v_i the gate looks at one source at a time, s_oi = <w_o, v_i>. So with the gradients
g of all reads, r and o, that saw it a source makes everything itself:

    dv_i = sum_ro (b_roi + relu(s_roi)) g_ro + ds_roi w_ro,    ds_roi = [s_roi >= 0] <g_ro, v_i>
    db_roi = g_ro * v_i,    dw_ro += ds_roi v_i                (summed over tokens; the score's norm is left out here)

A read's backward leaves its O gradients, in the sources' dtype, to its sources (`pulled`), each of which makes these
sums in one pass over the gradients of all reads that saw it: S + 2 tensors of its size, where reads that are
differentiated by themselves read n sources and write n gradients, which autograd then adds to one another. Scores are
computed again, from w and the source: kept, they would be n O numbers per token and read.

The gradients of b and w are complete when every source is: they belong to one node behind the sources', so
`rebuilt.loop` is given the parameters before there is any source. Other weights, and sources of several kinds or
without a gradient, take the way of `gated_mix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import choice, gated_sums, rebuilt
from .first_order import first_order
from .native import gated_mix as native
from .owed import Owed, Sums
from .precision import compute_dtype, full_precision

Gate = tuple[Tensor, Tensor, Tensor | None]  # b (O, n, d), w (O, d) and its gain (d,)


def gates_of(model: nn.Module) -> list[Gate]:
    """What the modules of a model name by `known_gates`.

    None of a model under FSDP, which reduces a block's gradients when the block's backward ends."""
    modules = list(model.modules())
    if any(hasattr(module, "unshard") for module in modules):
        return []
    asked = (getattr(module, "known_gates", None) for module in modules)
    return [found for known in asked if callable(known) and (found := known()) is not None]


def gained(gate: Tensor, gain: Tensor | None) -> Tensor:
    """w times its gain: in the loop the one that it made."""
    loop = rebuilt.current()
    made = None if loop is None or not loop.gates else known_of(loop).made.get((id(gate), id(gain)))
    if made is not None:
        return made
    return gate if gain is None else gate * gain


class Gates:
    """The known gates of a loop. anchor: what a source's node holds on to so that theirs runs after it."""

    def __init__(self, given: Sequence[Gate]) -> None:
        self.given = [
            g for g in given if all(map(choice.ordinary, g)) and g[0].ndim == 3 and g[0].requires_grad
        ]
        self.made = {(id(w), id(gain)): w if gain is None else w * gain for _, w, gain in self.given}
        self.places: dict[tuple[int, int], tuple[int, int]] = {}  # of their rows among all of b's, and of w's
        pairs: list[tuple[Tensor, Tensor]] = []
        rows = (0, 0)
        for b, w, gain in self.given:
            made = self.made[id(w), id(gain)]
            if len({x.shape[-1] for x, _ in [*pairs, (b, made)]}) > 1 or (id(b), id(made)) in self.places:
                continue
            self.places[id(b), id(made)], rows = rows, (rows[0] + b.shape[0] * b.shape[1], rows[1] + len(w))
            pairs.append((b, made))
        self.sums = Sums(rows[0]), Sums(rows[1])
        self.anchor = (
            _Gates.apply(self.sums, *(x for pair in pairs for x in pair)) if pairs else torch.empty(0)
        )


def known_of(loop: rebuilt.Loop) -> Gates:
    """The loop's gates."""
    if loop.gated is None:
        loop.gated = Gates(loop.gates)
    found: Gates = loop.gated
    return found


class _Gates(torch.autograd.Function):
    """Nothing; backward gives all weights and gates, in turn, what the sources gathered for them."""

    @staticmethod
    def forward(ctx: Any, sums: tuple[Sums, Sums], *tensors: Tensor) -> Tensor:
        ctx.sums, ctx.kinds = sums, [(x.shape, x.dtype) for x in tensors]
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        found, places = [sums.take() for sums in ctx.sums], [0, 0]
        grads: list[Tensor | None] = []
        for number, (shape, dtype) in enumerate(ctx.kinds):
            kind, rows = number % 2, shape[:-1].numel()
            made, start = found[kind], places[kind]
            places[kind] = stop = start + rows
            unused = made is None or made[1].isdisjoint(range(start, stop))
            grads.append(
                None if made is None or unused else made[0][start:stop].view(shape).to(dtype, copy=True)
            )
        return None, *grads


def known_gates(
    sources: Sequence[Tensor], weights: Tensor, gate: Tensor, eps: float | None
) -> tuple[Tensor, ...] | None:
    """The reads as `gated_mix` gives them; None if the weights are not known or the sources not of the loop."""
    from .pulled import mixed_ones

    loop = rebuilt.current()
    if loop is None or not loop.gates:
        return None
    known = known_of(loop)
    place = known.places.get((id(weights), id(gate)))
    found = None if place is None else mixed_ones(sources)
    if found is None:
        return None
    pull, rows, newest = found
    library = native.library("gated_mix", weights, gate, (newest,))
    about = pull, known.sums, place, eps
    out: tuple[Tensor, ...] = _KnownGates.apply(library, about, weights.detach(), gate.detach(), rows, newest)
    return out


class _KnownGates(torch.autograd.Function):
    """Kept are weights and gate. about: the sources' `Pull`, where gradients of weights belong, the score's epsilon.
    rows: the sources (N, d), contiguous; newest: of their handles."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        library, about, weights, gate, rows, newest = args
        ctx.about, ctx.kind = about, (rows[0].shape, newest.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, gate)
        laid = native.laid(weights, gate, compute_dtype(newest))
        run = gated_sums.read if library is None else partial(native.read, library)
        with full_precision(newest):
            return tuple(read.view(newest.shape) for read in run(about[-1], *laid, rows))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (weights, gate), (shape, dtype) = ctx.saved_tensors, ctx.kind
        pull, sums, place, eps = ctx.about
        left = [None if g is None else g.to(dtype).reshape(shape).contiguous() for g in grads]
        if any(g is not None for g in left):
            b, w = native.laid(weights, gate, compute_dtype(torch.empty(0, dtype=dtype)))
            pull.leave(Gated(sums, place, eps, b, w, left))
        return (None,) * 6


@dataclass(eq=False)
class Gated(Owed):
    """What a read leaves to its sources: b (O, n, d) and w (O, d) in the dtype of sums, the place of their first rows
    among all, whose gradients `sums` have, and g_o (N, d) of the reads that have one. at: where the first row of b and
    of w is, and every g, for kernels."""

    sums: tuple[Sums, Sums]
    place: tuple[int, int]
    eps: float | None
    weights: Tensor
    gate: Tensor
    grads: list[Tensor | None]
    at: tuple[int, int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.at = native.places(self.weights, self.gate, self.grads)

    def parts(self, i: int) -> list[tuple[Gated, int, int]]:
        """(itself, o, row of b) for each g_o, of the i-th source."""
        n = self.weights.shape[1]
        return [(self, o, o * n + i) for o, g in enumerate(self.grads) if g is not None]

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[Gated, int]]) -> list[Tensor]:
        """See `Owed`."""
        (weights, gates), made = left[0][0].sums, []
        for eps in dict.fromkeys(read.eps for read, _ in left):
            every = [part for read, i in left if read.eps == eps for part in read.parts(i)]
            library = choice.kernel("gated_pull", (x,)) if x.numel() else None
            run = gathered if library is None else partial(native.gathered, library)
            dx, db, dw = run(eps, x, every)
            weights.add([read.place[0] + row for read, _, row in every], db)
            gates.add([read.place[1] + o for read, o, _ in every], dw)
            made.append(dx)
        return made


def gathered(
    eps: float | None, x: Tensor, every: Sequence[tuple[Gated, int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a source x (N, d), and of the S weights (S, d) and gates (S, d) by which it was read."""
    b = torch.stack([read.weights.flatten(0, 1)[row] for read, _, row in every])
    w = torch.stack([read.gate[o] for read, o, _ in every])
    return gated_sums.back(eps, b, w, x, [g for read, o, _ in every if (g := read.grads[o]) is not None])
