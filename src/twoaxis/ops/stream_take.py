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
from .precision import cast
from .stream_scores import place_of, streams_of
from .streams import stream_write


class Taken(NamedTuple):
    """A read h (..., d), what mixes (..., n, n), or None, and writes (..., n), and X for the write that follows.

    of: X as it was given."""

    read: Tensor
    mixing: Tensor | None
    write: Tensor
    streams: Tensor
    of: Tensor

    def written(self, state: Tensor, y: Tensor) -> Tensor:
        """The next state, of the one that was taken from: another one is not this node's."""
        return stream_write(self.streams if self.of is state else state, self.mixing, self.write, y)


class _Kernels(NamedTuple):
    scores: Any
    gates: Any
    read: Any


def hyper_take(
    X: Tensor,
    matrix: Tensor,
    static: Tensor,
    s_alpha: Tensor,
    s_beta: Tensor,
    gain: Tensor | None,
    *,
    tanh: bool,
    eps: float,
    read_eps: float,
) -> Taken | None:
    """`stream_scores`, `hyper_gates` and `stream_read`; None where no gradient is asked or a kernel does not cover it.

    eps: of the scores' norm. gain, read_eps: of the read's. Shapes as in these operators.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    form = stream_gates.Form(False, X.shape[-2], tanh=tanh)
    found = (
        stream_scores.library(X, matrix),
        stream_gates.library(form, cast(static, torch.float32), s_alpha, s_beta),
        reads.library(X, None, gain),
    )
    if any(lib is None for lib in found):
        return None
    loop, place = rebuilt.current(), place_of(X)
    given = (X, matrix, static, s_alpha, s_beta, gain)
    made = _HyperTake.apply(place, _Kernels(*found), form, (eps, read_eps), *given)
    h, mixing, write, onward = made
    taken = Taken(h, mixing, write, onward, X)
    if loop is not None and place is not None:
        loop.stand(taken.streams, place)
    return taken


class _HyperTake(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, place: Any, kernels: _Kernels, form: stream_gates.Form, eps: tuple[float, float], X: Tensor,
        matrix: Tensor, static: Tensor, s_alpha: Tensor, s_beta: Tensor, gain: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.place, ctx.kernels, ctx.form, ctx.eps = place, kernels, form, eps
        ctx.set_materialize_grads(False)
        z = stream_scores.forward(kernels.scores, X, matrix, eps[0])
        gates = stream_gates.forward(kernels.gates, form, z, static, (s_alpha, s_beta))
        assert gates is not None
        weights, write, mixing = gates
        assert mixing is not None
        h = reads.read(kernels.read, X, weights, gain, eps[1])
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
        return None, None, None, None, dX, cast(dmatrix, matrix.dtype), *learned, dgain
