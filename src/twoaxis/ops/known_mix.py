"""Mixes over depth whose weights are known when the loop over all layers opens: their backward reads no source.

Of h_l = sum_j w_lj x_j with weights that depend on no token, backward needs g_l = dL/dh_l and the sources:

    dx_j = sum_l w_lj g_l,    dw_lj = sum over tokens of <g_l, x_j>

A mix that is differentiated by itself reads its n sources, writes n gradients and leaves it to autograd to add them to
those of other mixes. Here it leaves g_l to its sources (`pulled`), each of which makes both sums in one pass over the
gradients of the S mixes that saw it, S + 2 tensors of its size in all. g_l is kept in the sources' dtype, as autograd
would; beside it a mix keeps its n numbers, and the sources are kept once, by themselves.

The weights' gradients are complete when every source is: all of them belong to one node behind the sources', so
`rebuilt.loop` is given the parameters, and makes the weights of it, before there is any source. Other weights, and
sources of several kinds or without a gradient, take the way of `mix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import choice, mix_sums, rebuilt
from .first_order import first_order
from .mix_sums import Mixed
from .native import mix as native
from .owed import Sums
from .precision import compute_dtype


def weights_of(model: nn.Module) -> list[tuple[Tensor, bool]]:
    """What the modules of a model name by `known_weights`: a parameter (n,), and whether its softmax are the weights.

    None of a model under FSDP, which reduces a block's gradients when the block's backward ends."""
    modules = list(model.modules())
    if any(hasattr(module, "unshard") for module in modules):
        return []
    asked = (getattr(module, "known_weights", None) for module in modules)
    return [found for known in asked if callable(known) and (found := known()) is not None]


def softmaxed(logits: Tensor) -> Tensor:
    """The softmax of a parameter (n,): in the loop the one that it made."""
    loop = rebuilt.current()
    made = None if loop is None or not loop.weights else known_of(loop).made.get(id(logits))
    return logits.softmax(0) if made is None else made


class Weights:
    """The known weights of a loop. anchor: what a source's node holds on to so that theirs runs after it."""

    def __init__(self, given: Sequence[tuple[Tensor, bool]]) -> None:
        usable = [(x, s) for x, s in given if choice.ordinary(x) and x.requires_grad and x.ndim == 1]
        self.given = [x for x, _ in usable]  # alive, since they are known by their ids
        self.made = {id(x): x.softmax(0) if soft else x for x, soft in usable}
        self.places: dict[int, int] = {}
        every, size = list(self.made.values()), 0
        for w in every:
            self.places[id(w)], size = size, size + len(w)
        self.sums = Sums(size)  # of all weights' gradients, one after the other
        self.anchor = _Weights.apply(self.sums, *every) if every else torch.empty(0)


def known_of(loop: rebuilt.Loop) -> Weights:
    """The loop's weights."""
    if loop.mixes is None:
        loop.mixes = Weights(loop.weights)
    found: Weights = loop.mixes
    return found


class _Weights(torch.autograd.Function):
    """Nothing; backward gives all weights what the sources gathered for them."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, *weights: Tensor) -> Tensor:
        ctx.sums, ctx.kinds = sums, [(len(w), w.dtype) for w in weights]
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        found, place = ctx.sums.take(), 0
        grads: list[Tensor | None] = []
        for n, dtype in ctx.kinds:
            unused = found is None or found[1].isdisjoint(range(place, place + n))
            grads.append(
                None if found is None or unused else found[0][place : place + n].to(dtype, copy=True)
            )
            place += n
        return None, *grads


def known_mix(sources: Sequence[Tensor], weights: Tensor) -> Tensor | None:
    """sum_j w_j x_j, or None if the weights (n,) are not known or the sources not of the loop."""
    from .pulled import mixed_ones

    loop = rebuilt.current()
    if loop is None or not loop.weights or isinstance(sources, Tensor):
        return None
    known = known_of(loop)
    place = known.places.get(id(weights))
    fits = place is not None and len(weights) == len(sources) and sources[0].ndim
    found = mixed_ones(sources) if fits else None
    if found is None:
        return None
    pull, rows, newest = found
    library = choice.kernel("mix", (newest,), (weights,)) if newest.numel() else None
    out: Tensor = _KnownMix.apply(library, pull, (known.sums, place), weights.detach(), rows, newest)
    return out


class _KnownMix(torch.autograd.Function):
    """Kept are the weights. place: where their gradients belong. rows: the sources (N, d), contiguous; newest: of their
    handles."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        library, pull, place, weights, rows, newest = args
        ctx.pull, ctx.place, ctx.kind = pull, place, (rows[0].shape, newest.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights)
        w = weights.to(compute_dtype(newest))
        run = mix_sums.mixed if library is None else partial(native.mixed, library)
        return run(w.contiguous(), rows).view(newest.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        (weights,), (shape, dtype) = ctx.saved_tensors, ctx.kind
        if dout is not None:
            g = dout.to(dtype).reshape(shape).contiguous()
            sums, place = ctx.place
            ctx.pull.leave(Mixed(sums, place, weights.to(compute_dtype(g)).contiguous(), g))
        return (None,) * 6
