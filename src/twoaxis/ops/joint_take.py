"""All that a sublayer of mHC takes of its streams, as one node of the graph (arXiv 2512.24880): see `stream_take`.

    z = vec(X) phi / rms(vec(X)),   [P~ | Q~ | R~] = a z + b,   h = norm(P X);   X goes on as it is

Products with phi stay torch's. Backward, the write moves 3 n d numbers (X, G, D), the read n d, the two products
2 n d, and a gathering 4 n d (X, D, what the product gave, dX): 10 n d in place of 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .first_order import first_order
from .native import stream_gates, streams
from .native.stream_pass import Made, Taking
from .precision import cast, few, full_precision
from .stream_scores import joint_back, joint_forward, place_of, streams_of
from .stream_take import Taken, taken


def mhc_take(X: Tensor, taking: Taking, made: Made | None = None) -> Taken | None:
    """`joint_scores`, `mhc_gates` and `stream_read`; None where a kernel does not cover it, or of a step's few tokens.

    made: ahead, with X. Shapes as in these operators.
    """
    if torch.compiler.is_compiling() or few((X,)):
        return None
    form, phi, bias, (scales,), gain, eps, read_eps = taking
    reads = streams.library(X, None, phi, gain)
    gates = stream_gates.library(form, cast(bias, torch.float32), scales)
    if reads is None or gates is None:
        return None
    if made is None:
        with torch.no_grad(), full_precision(X):
            z, r = joint_forward(X, phi, eps)
            if (found := stream_gates.forward(gates, form, z, bias, (scales,))) is None:
                return None
            made = Made(z, r, found, streams.read(reads, X, found[0], gain, read_eps))
    place = place_of(X)
    given = (X, phi, scales, bias, gain)
    return taken(X, place, _JointTake.apply(place, (reads, gates), form, read_eps, made, *given))


class _JointTake(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, place: Any, kernels: tuple[Any, Any], form: stream_gates.Form, read_eps: float, made: Made,
        X: Tensor, phi: Tensor, scales: Tensor, bias: Tensor, gain: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.place, ctx.kernels, ctx.form, ctx.eps = place, kernels, form, read_eps
        ctx.set_materialize_grads(False)
        z, r, (weights, write, mixing), h = made
        ctx.save_for_backward(*(() if place is not None else (X,)), phi, scales, bias, gain, z, r, weights)
        return h, mixing, write, X

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dh: Tensor | None, dmixing: Tensor | None, dwrite: Tensor | None, D: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        X, phi, scales, bias, gain, z, r, weights = streams_of(ctx, ctx.saved_tensors)
        reads, gates = ctx.kernels
        *lead, n, d = X.shape
        dh = X.new_zeros(*lead, d) if dh is None else dh
        dwrite = z.new_zeros(*lead, n) if dwrite is None else dwrite
        if dmixing is None and len(scales) == 3:
            dmixing = z.new_zeros(*lead, n, n)
        g, dweights, dgain = streams.read_back(reads, X, weights, gain, ctx.eps, dh, alone=True)
        dz, sums = stream_gates.backward(gates, ctx.form, z, bias, (scales,), (dweights, dwrite, dmixing))
        with full_precision(X):
            part, back, dphi = joint_back(X, phi, z, r, dz)
        dX = streams.gather(reads, X, part, D, weights, g, back)
        dgain = None if dgain is None or gain is None else cast(dgain, gain.dtype)
        dbias, dscales = (
            cast(sums[: len(bias)], bias.dtype),
            cast(sums[len(bias) :][: len(scales)], scales.dtype),
        )
        return *(None,) * 5, dX, dphi, dscales, dbias, dgain
