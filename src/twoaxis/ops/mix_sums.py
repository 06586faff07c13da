"""What weighted sums of states compute, as plain operations: see `ops.mix` and `ops.known_mix`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import choice
from .checks import source_dtype
from .native import mix as native
from .owed import Owed, Sums
from .precision import compute_dtype, full_precision, token_chunks


@dataclass(eq=False)
class Mixed(Owed):
    """What a mix by known weights leaves to its sources: w (n,) in the dtype of sums, their place among all known
    weights, whose gradients `sums` has, and g = dL/dh (N, d)."""

    sums: Sums
    place: int
    weights: Tensor
    g: Tensor

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[Mixed, int]]) -> list[Tensor]:
        """See `Owed`."""
        library = choice.kernel("mix", (x,)) if x.numel() else None
        run = gathered if library is None else partial(native.gathered, library)
        total, along = run(x, left)
        left[0][0].sums.add([mix.place + i for mix, i in left], along)
        return [total]


def mixed(weights: Sequence[Tensor] | Tensor, sources: Sequence[Tensor]) -> Tensor:
    """sum_i w_i x_i, like a source. weights: (), (d,) or (..., 1), or as one tensor (n,)."""
    dtype, d, shape = compute_dtype(*sources), sources[0].shape[-1], sources[0].shape
    ws, xs = flat(tuple(weights), dtype), [x.reshape(-1, d) for x in sources]
    out = torch.empty(xs[0].shape, dtype=source_dtype(xs), device=xs[0].device)
    with full_precision(out):
        for t in chunks(xs, dtype):
            total = out[t] if out.dtype == dtype else torch.empty_like(out[t], dtype=dtype)
            torch.mul(xs[0][t].to(dtype), rows(ws[0], t), out=total)
            for x, w in zip(xs[1:], ws[1:]):
                total.addcmul_(x[t].to(dtype), rows(w, t))
            if out.dtype != dtype:
                out[t] = total
    return out.view(shape)


def gathered(x: Tensor, left: Sequence[tuple[Mixed, int]]) -> tuple[Tensor, Tensor]:
    """sum_s w_s g_s of a source x (N, d) in its dtype, and <g_s, x> over all tokens, (S,)."""
    dtype = left[0][0].weights.dtype
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    along = torch.zeros(len(left), dtype=dtype, device=x.device)
    for t in chunks([x], dtype):
        v = x[t].to(dtype)
        total = torch.zeros_like(v, memory_format=torch.contiguous_format)
        for s, (read, i) in enumerate(left):
            g = read.g[t].to(dtype)
            total.addcmul_(g, read.weights[i])
            along[s] += torch.dot(g.flatten(), v.flatten())
        out[t] = total
    return out, along


def flat(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Weights per token as (N, 1), the others as they are."""
    return [w.to(dtype) if w.ndim < 2 else w.to(dtype).reshape(-1, 1) for w in weights]


def rows(w: Tensor, t: slice) -> Tensor:
    """The weights of a chunk of tokens."""
    return w if w.ndim < 2 else w[t]


def chunks(sources: Sequence[Tensor], dtype: torch.dtype) -> list[slice]:
    """Of the tokens of sources (N, d)."""
    x = sources[0]
    if all(x.dtype == dtype for x in sources):
        return [slice(None)]  # no copies to keep in cache
    return list(token_chunks(len(x), x.shape[-1], x))
