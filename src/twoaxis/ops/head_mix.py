"""Mixes of heads over depth: each head of the result is a sum over the heads of all sources, by weights of no token.

    [y]_h = sum_m sum_g R[h, (m, g)] [x_m]_g;   dx_m = sum over the mixes that saw x_m of R_m^T g,   dR_m = <g, x_m>

A source holds its heads one after the other in memory, (H_m, tokens x D) as a matrix, so that a mix is a chain of
products R_m x_m with few rows and long ones, each of which reads its source once and adds to the result in place: no
copy of all sources side by side, and no transposed ones. A kernel adds up 16 heads at a time. Backward makes dR from
the sources. In the decoder's own loop (`pulled`) it leaves g to them, and each sums up its gradient in the same way
(`head_pull`); elsewhere a mix writes its sources' gradients, which autograd adds to one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from . import choice
from .checks import check_head_mix, source_dtype
from .first_order import first_order
from .head_pull import HeadMixed, chain, like
from .native import head_mix as native
from .precision import cast, compute_dtype, few, full_precision
from .pulled import headed_ones


def head_rows(*parts: Tensor) -> Tensor:
    """A source (..., D, H) of parts (..., H, width), D the sum of widths: in memory a head is followed by the next.

    Raises InputError for no parts, or parts that differ in more than their width.
    """
    if not parts or any(x.ndim < 2 or x.shape[:-1] != parts[0].shape[:-1] for x in parts):
        shapes = ", ".join(str(tuple(x.shape)) for x in parts)
        raise InputError(f"parts {shapes or 'none'}: give at least one, (..., H, width), alike but for width")
    if few(parts):
        return torch.cat(parts, -1).mT.contiguous()
    return torch.cat([x.movedim(-2, 0) for x in parts], -1).movedim(0, -1)


def head_mix(sources: Sequence[Tensor], weight: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """The mixed heads (..., H, D), cut into parts of these widths (LIMe 2502.09245: keys and values).

    Sums run in at least float32 and are cast once to the dtype that holds all sources. Backward keeps sources and
    weight. In the decoder's own loop a source gathers its gradient once, from all mixes.

    Args:
        sources: tuple of n tensors (..., D, H_m), of any layout; `head_rows` makes the fastest.
        weight: (H, sum of all H_m), oldest source first.
        widths: of the parts, D in all.

    Returns:
        a tensor (..., H, width) for each width, contiguous.

    Raises:
        InputError: for shapes that do not fit.
    """
    if (equation := choice.equation("head_mix")) is not None:
        return tuple(part.contiguous() for part in equation(sources, weight, widths))
    check_head_mix(sources, weight, widths)
    if few(sources):
        dtype = compute_dtype(*sources)
        with full_precision(sources[0]):
            mixed = F.linear(cast(torch.cat(tuple(sources), -1), dtype), cast(weight, dtype)).mT
        return tuple(part.contiguous() for part in cast(mixed, source_dtype(sources)).split(list(widths), -1))
    found = headed_ones(sources)
    pull, rows, given = (None, None, tuple(sources)) if found is None else (found[0], found[1], (found[2],))
    made: tuple[Tensor, ...] = _HeadMix.apply(pull, rows, tuple(widths), weight, *given)
    return made


class _HeadMix(torch.autograd.Function):
    """Kept are weight and sources. rows: those of the loop, (H_m, tokens x D), and then only the newest one's handle is
    given."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        pull, rows, widths, weight, *sources = args
        newest, ctx.pull, ctx.widths = sources[-1], pull, widths
        mixed = sources if rows is None else rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, *mixed)
        library = choice.kernel("token_mix", mixed, (weight,)) if newest.numel() else None
        rows, w = _rows(sources) if rows is None else rows, cast(weight, compute_dtype(*mixed))
        with full_precision(newest):
            total = chain(_parts(w, rows), rows) if library is None else native.mixed(library, w, rows)
        dtype = source_dtype(mixed)
        parts = total.view(len(total), *newest.shape[:-1]).movedim(0, -2).split(list(widths), -1)
        return tuple(x.to(dtype, copy=True, memory_format=torch.contiguous_format) for x in parts)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors  # once: a checkpoint unpacks it once
        none, given = (None,) * len(ctx.needs_input_grad), next((g for g in grads if g is not None), None)
        if given is None:
            return none
        rows = _rows(sources) if ctx.pull is None else sources
        lead, dtype = given.shape[:-2], compute_dtype(*sources)
        heads = given.new_empty(len(weight), *lead, sum(ctx.widths))
        for part, grad in zip(heads.split(list(ctx.widths), -1), grads, strict=True):
            part.zero_() if grad is None else part.copy_(grad.movedim(-2, 0))
        g, w, dweight = heads.flatten(1), cast(weight.detach(), dtype).contiguous(), None
        dsources: tuple[Tensor | None, ...] = none[4:]
        with full_precision(g):
            wide = cast(g, dtype)
            if ctx.needs_input_grad[3]:
                dweight = torch.cat([wide @ cast(x, dtype).mT for x in rows], 1).to(weight.dtype)
            if ctx.pull is not None:
                ctx.pull.leave(HeadMixed(w, tuple(map(len, rows)), g, ctx.pull.sources))
            else:
                wanted = zip(_parts(w, rows), sources, ctx.needs_input_grad[4:], strict=True)
                dsources = tuple(like(part.mT @ wide, x) if want else None for part, x, want in wanted)
        return None, None, None, dweight, *dsources


def _parts(weight: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The weight's columns of each source."""
    return weight.split([len(x) for x in rows], 1)


def _rows(sources: Sequence[Tensor]) -> list[Tensor]:
    """(..., D, H_m) as (H_m, tokens x D): copies, where that is not how they lie."""
    return [x.movedim(-1, 0).flatten(1) for x in sources]
