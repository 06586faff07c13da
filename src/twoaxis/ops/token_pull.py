"""What mixes by weights of each token leave to their sources, and how these gather it: see `ops.token_mix`.

    dx_i = sum over the S mixes that saw x_i, and their sums o, of w_oi g_o

A source reads O S gradients. Those before it were seen by the same mixes, and later by a few more, which have not run
backward yet; so the kernel sums up for four sources what it reads for one: O S / 4 + 1 tensors of a source's size for
each. In bfloat16 every source reads its own, as what is made ahead would be rounded once more.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import choice, mix_sums
from .native import token_mix as native
from .owed import Owed
from .pulled import Source

AT_ONCE = 4  # sources


class Shared(Owed, ABC):
    """What an operator leaves that knows its sources: one of them may gather for those before it."""

    sources: tuple[Source, ...]


@dataclass(eq=False)
class TokenMixed(Shared):
    """What a mix leaves: its weights (N, O, n) in the dtype of sums, g_o = dL/dh_o (N, d) by o, where there is one, and
    its sources. at: where each g_o is and its weights begin, once a kernel has asked."""

    weights: Tensor
    grads: dict[int, Tensor]
    sources: tuple[Source, ...]
    at: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[TokenMixed, int]]) -> list[Tensor]:
        """See `Owed`."""
        library = choice.kernel("token_mix", (x,)) if x.numel() else None
        if library is None:
            return [gathered(x, left)]
        before = older(left) if x.dtype == torch.float32 else []
        own, *ahead = native.gathered(library, x, left, 1 + len(before))
        for source, part in zip(before, ahead, strict=True):
            source.exchange(cls, Ahead(part))
        return [own]


@dataclass(eq=False)
class Ahead(Owed):
    """A part (N, d) of a source's gradient that was made with a later source's."""

    part: Tensor

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[Ahead, int]]) -> list[Tensor]:
        """See `Owed`."""
        return [made.part for made, _ in left]


def gathered(x: Tensor, left: Sequence[tuple[TokenMixed, int]]) -> Tensor:
    """sum over mixes and o of w_oi g_o of a source x_i (N, d), in its dtype."""
    ws = [mix.weights[:, o, i].unsqueeze(-1) for mix, i in left for o in mix.grads]
    return mix_sums.mixed(ws, [g for mix, _ in left for g in mix.grads.values()])


def older(left: Sequence[tuple[Shared, int]]) -> list[Source]:
    """The sources before one that the same mixes saw, so far alone: none if it is not worth it."""
    found: list[Source] = []
    kind = type(left[0][0])
    while len(left) >= AT_ONCE and len(found) < AT_ONCE - 1:
        left = [(mix, i - 1) for mix, i in left]
        mix, i = left[0]
        if any(i < 0 for _, i in left) or mix.sources[i].of(kind) != left:
            break
        found.append(mix.sources[i])
    return found
