"""What mixes of heads leave to their sources, and how these gather it: see `ops.head_mix`.

    dx_m = sum over the mixes that saw x_m of R_m^T g

Plainly a chain of products for each source. The kernel makes the gradients of four sources of float32 at once, which
were seen by the same mixes so far, as `token_pull` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from . import choice
from .native import head_mix as native
from .precision import cast, compute_dtype
from .pulled import Source
from .token_pull import Ahead, Shared, older


@dataclass(eq=False)
class HeadMixed(Shared):
    """What a mix leaves: R (H, sum of sizes) in the dtype of sums, the number of heads of each source, and g
    (H, tokens x D) in the dtype of the result."""

    weight: Tensor
    sizes: tuple[int, ...]
    g: Tensor
    sources: tuple[Source, ...]

    @cached_property
    def parts(self) -> list[Tensor]:
        """R_m^T (H_m, H) of each source."""
        return [part.mT for part in self.weight.split(self.sizes, 1)]

    @cached_property
    def ends(self) -> list[int]:
        """Where each source's columns end."""
        return list(accumulate(self.sizes))

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[HeadMixed, int]]) -> list[Tensor]:
        """See `Owed`; x is (tokens x D, heads)."""
        mix, i = left[0]
        library = choice.kernel("token_mix", (x, *(mix.g for mix, _ in left))) if x.numel() else None
        if library is None:
            return [like(chain([mix.parts[i] for mix, i in left], [mix.g for mix, _ in left]), x)]
        before = older(left) if x.dtype == torch.float32 else []
        sizes = [mix.sizes[i - k] for k in range(1 + len(before))]
        own, *ahead = (part.mT for part in native.gathered(library, left, sizes))
        for source, part in zip(before, ahead, strict=True):
            source.exchange(cls, Ahead(part))
        return [own]


def chain(weights: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """sum_m R_m x_m, (H, tokens x D), of x_m (H_m, tokens x D), in the widest dtype of weights."""
    dtype = compute_dtype(*weights)
    total = cast(weights[0], dtype) @ cast(rows[0], dtype)
    for w, x in zip(weights[1:], rows[1:], strict=True):
        torch.addmm(total, cast(w, dtype), cast(x, dtype), out=total)
    return total


def like(rows: Tensor, x: Tensor) -> Tensor:
    """(H, tokens x D) like a source (..., D, H)."""
    return cast(rows.view(len(rows), *x.shape[:-1]), x.dtype).movedim(0, -1)
