"""Reads over depth whose queries are known when the loop over all layers opens: their backward reads no source.

Of a softmax read h = sum_i a_i v_i by a query that depends on no token, with keyed query w, s_i = scale r_i <w, v_i>
and g = dL/dh, the gradient of a logit needs only the source itself and what the read put out:

    ds_i = a_i (<g, v_i> - <g, h>),    c_i = scale r_i ds_i

So a read's backward goes from the gradient of its output y = gain rho h, rho = 1 / rms(h), to g and <g, h>, and leaves
both to its sources. Where a source's gradient is gathered (`pulled`) from the reads s that saw it, so are the dots

    dv = sum_s a_s g_s + c_s w_s - v (r^2 / d) sum_s c_s <w_s, v>,    dw_s += sum over tokens of c_s v

One pass over g_s of S reads makes both, S + 2 tensors of a source's size in all, where a read that makes its own
logits' gradients moves its n sources once more. h is y / (gain rho), so no state is kept beside y, which the next
product keeps anyway; where a gain is 0, h is summed again. g is kept in the sources' dtype, as autograd would.

The queries' gradients are complete when every source is: all of them belong to one node behind the sources', to
which `rebuilt.loop` is given the queries. Queries that it does not know take the way of `pulled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import choice, known_sums
from .first_order import first_order
from .known_sums import Later
from .native import known_read as native
from .owed import Sums
from .precision import full_precision

if TYPE_CHECKING:
    from .token_read import Options

Query = tuple[Tensor, Tensor | None]  # a query (d,) and its key gain
SMALLEST = 1e-18  # of a gain that is divided by


def queries_of(model: nn.Module) -> list[Query]:
    """What the modules of a model name by `known_query`: what their reads ask for in every pass."""
    asked = (getattr(module, "known_query", None) for module in model.modules())
    return [query for known in asked if callable(known) and (query := known()) is not None]


class Known:
    """The queries of a loop. anchor: what a source's node holds on to so that theirs runs after it."""

    def __init__(self, queries: Sequence[Query]) -> None:
        usable = (pair for pair in queries if all(x is None or choice.ordinary(x) for x in pair))
        once = {_names(*pair): pair for pair in usable}  # modules may share one
        self.rows, plain = {names: row for row, names in enumerate(once)}, list(once.values())
        self.sums = Sums(len(plain))  # of gradients of w, (R, d)
        self.d = {pair[0].shape for pair in plain}
        tensors = (x for pair in plain for x in pair)
        self.anchor = _Queries.apply(self.sums, *tensors) if len(self.d) == 1 else torch.empty(0)

    def place(self, query: Tensor, gain: Tensor | None) -> tuple[Sums, int] | None:
        """Of its gradient, None for a query that nobody announced."""
        row = self.rows.get(_names(query, gain)) if self.anchor.requires_grad else None
        return None if row is None else (self.sums, row)


def _names(query: Tensor, gain: Tensor | None) -> tuple[int, int]:
    return id(query), id(gain)


class _Queries(torch.autograd.Function):
    """Nothing; backward gives every query what the sources gathered for it."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, *tensors: Tensor | None) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, found = ctx.saved_tensors, ctx.sums.take()
        if found is None:
            return (None,) * (1 + len(tensors))
        grads: list[Tensor | None] = []
        for row, (query, gain, d) in enumerate(zip(tensors[::2], tensors[1::2], found[0])):
            used = row in found[1]
            grads.append((d if gain is None else d * gain).to(query.dtype) if used else None)
            grads.append((d * query).to(gain.dtype) if used and gain is not None else None)
        return None, *grads


def known_read(
    o: Options, query: Tensor, key_gain: Tensor | None, output_gain: Tensor | None, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """The read as `depth_read` gives it, and, in place of its weights, anything; None if it is not one of these."""
    from .pulled import known

    if o.eps is None or o.eps < 0 or o.heads != 1 or o.normalize != "softmax" or o.return_weights:
        return None
    if o.output_eps is None and any(x.dtype.itemsize < 4 for x in sources):
        return None  # <g, h> of a rounded h, which is a difference here, has too few digits
    found = known(query, key_gain, sources, o.eps)
    if found is None or (output_gain is not None and output_gain.shape != query.shape):
        return None
    place, pull, seen, newest = found
    library = None
    if newest.numel():
        library = choice.kernel("known_read", (newest,), (query, key_gain, output_gain))
    out: Tensor = _KnownRead.apply(library, o, pull, place, (query, key_gain), seen, output_gain, newest)
    return out, query


class _KnownRead(torch.autograd.Function):
    """Kept are the output, the sources' dots, and two numbers per token. newest: of the sources' handles."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        library, o, pull, place, query, seen, gain, newest = args
        with full_precision(newest):
            w = _keyed(query, seen[0].factor.dtype)
            run = known_sums.read if library is None else partial(native.read, library)
            out, dots, lse, rho = run(o, w, gain, seen)
        out = out.view(newest.shape)
        again = gain is not None and bool((gain.abs() < SMALLEST).any())  # h cannot be had from the output
        ctx.o, ctx.pull, ctx.place, ctx.library = o, pull, place, library
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*query, gain, out, dots, lse, rho, *([x.rows for x in seen] if again else ()))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key_gain, gain, out, dots, lse, rho, *rows = ctx.saved_tensors
        o, dgain = ctx.o, None
        if dout is not None:
            with full_precision(out):
                w = _keyed((query, key_gain), dots.dtype)
                dy = dout.reshape(-1, out.shape[-1]).to(out.dtype).contiguous()
                y = out.reshape(dy.shape)
                if o.output_eps is None:
                    g, mean = dy, (dy.to(dots.dtype) * y).sum(-1)
                else:
                    ones = torch.ones(y.shape[1], dtype=dots.dtype, device=y.device)
                    known, inverse = ones if gain is None else gain.to(dots.dtype), ones
                    if rows:
                        y = known_sums.unscaled(o, rows, dots, lse, rho)
                    elif gain is not None:
                        inverse = 1 / known
                    run = known_sums.back if ctx.library is None else partial(native.back, ctx.library)
                    g, mean, dgain = run(o.output_eps, known.contiguous(), inverse, y, rho, dy)
            sums, row = ctx.place
            ctx.pull.leave(Later(sums, row, o, w, g, dots, lse, mean))
        dgain = None if dgain is None or gain is None else dgain.to(gain.dtype)
        return None, None, None, None, None, None, dgain, None


def _keyed(query: Query, dtype: torch.dtype) -> Tensor:
    w = query[0].to(dtype)
    return w.contiguous() if query[1] is None else w * query[1].to(dtype)
