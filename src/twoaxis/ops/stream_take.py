"""All that a sublayer takes of its streams before its own function, as one node of the graph (arXiv 2409.19606).

    z = layer_norm(X) W,   [A_m | A_r | B] = static + s tanh(z),   h = norm(A_m^T X);   X goes on as it is

By themselves scores, read and write each write a gradient of X, and autograd adds them up: with D for what comes from
elsewhere and G for dL/dX', n streams of d, backward moves 7 n d numbers for the three and 3 n d for each of two sums.
Here X is handed on to the write, so that this node is given D = M^T G from it, and one pass makes

    dX = D + A_m dh + (what the scores give)

The write moves 3 n d (X, G, D), the read's backward n d (X), the pass 3 n d (X, D, dX): 7 n d in place of 13. Kept
are X, or its place in the decoder's loop, and the scores and gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rebuilt
from .first_order import first_order
from .native import stream_gates, stream_scores
from .native import streams as reads
from .native.stream_pass import Made, Taking
from .precision import cast, few
from .stream_scores import place_of, streams_of


class Taken(NamedTuple):
    """A read h (..., d), what mixes (..., n, n), or None, and writes (..., n), and X for the write that follows.

    of: X as it was given."""

    read: Tensor
    mixing: Tensor | None
    write: Tensor
    streams: Tensor
    of: Tensor

    def last(self, state: Tensor) -> Tensor:
        """The streams as the write has to take them: X, if it is the state that was taken from."""
        return self.streams if self.of is state else state


class _Kernels(NamedTuple):
    scores: Any
    gates: Any
    read: Any


def hyper_take(X: Tensor, taking: Taking, made: Made | None = None) -> Taken | None:
    """`stream_scores`, `hyper_gates` and `stream_read`; None where no kernel covers it, or of a step's few tokens.

    made: ahead, with X. Shapes as in these operators.
    """
    if torch.compiler.is_compiling() or few((X,)):
        return None
    form, matrix, static, (s_alpha, s_beta), gain, eps, read_eps = taking
    found = (
        stream_scores.library(X, matrix),
        stream_gates.library(form, cast(static, torch.float32), s_alpha, s_beta),
        reads.library(X, None, gain),
    )
    if any(lib is None for lib in found):
        return None
    place = place_of(X)
    given = (X, matrix, static, s_alpha, s_beta, gain)
    return taken(X, place, _HyperTake.apply(place, _Kernels(*found), form, (eps, read_eps), made, *given))


def taken(X: Tensor, place: Any, made: tuple[Tensor, Tensor | None, Tensor, Tensor]) -> Taken:
    """Outputs of a node; the X that it hands on stands in the decoder's loop where X stood."""
    h, mixing, write, onward = made
    loop = rebuilt.current()
    if loop is not None and place is not None:
        loop.stand(onward, place)
    return Taken(h, mixing, write, onward, X)


class _HyperTake(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, place: Any, kernels: _Kernels, form: stream_gates.Form, eps: tuple[float, float], made: Made | None,
        X: Tensor, matrix: Tensor, static: Tensor, s_alpha: Tensor, s_beta: Tensor, gain: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.place, ctx.kernels, ctx.form, ctx.eps = place, kernels, form, eps
        ctx.set_materialize_grads(False)
        z = stream_scores.forward(kernels.scores, X, matrix, eps[0]) if made is None else made.scores
        gates = (
            made.gates if made else stream_gates.forward(kernels.gates, form, z, static, (s_alpha, s_beta))
        )
        assert gates is not None
        weights, write, mixing = gates
        assert mixing is not None
        h = made.read if made else reads.read(kernels.read, X, weights, gain, eps[1])
        ctx.save_for_backward(
            *(() if place is not None else (X,)), matrix, static, s_alpha, s_beta, gain, z, weights
        )
        return h, mixing, write, X

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dh: Tensor | None, dmixing: Tensor | None, dwrite: Tensor | None, D: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        X, matrix, static, s_alpha, s_beta, gain, z, weights = streams_of(ctx, ctx.saved_tensors)
        kernels, form, n = ctx.kernels, ctx.form, X.shape[-2]
        dh = X.new_zeros((*X.shape[:-2], X.shape[-1])) if dh is None else dh
        dmixing = z.new_zeros((*z.shape[:-1], n)) if dmixing is None else dmixing
        dwrite = z.new_zeros(z.shape[:-1]) if dwrite is None else dwrite
        g, dweights, dgain = reads.read_back(kernels.read, X, weights, gain, ctx.eps[1], dh, alone=True)
        grads = (dweights, dwrite, dmixing)
        dz, sums = stream_gates.backward(kernels.gates, form, z, static, (s_alpha, s_beta), grads)
        beside = stream_scores.Beside(D, weights, g, z)
        dX, dmatrix = stream_scores.backward(kernels.scores, X, matrix, ctx.eps[0], dz, beside)
        dgain = None if dgain is None or gain is None else cast(dgain, gain.dtype)
        parts = sums.split((static.numel(), 1, 1, 1))
        learned = (cast(d, x.dtype).view(x.shape) for d, x in zip(parts, (static, s_alpha, s_beta)))
        return *(None,) * 5, dX, cast(dmatrix, matrix.dtype), *learned, dgain
