"""One static weight per source: a convex combination (softmax of logits) or a free sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from twoaxis.depth.history import History
from twoaxis.depth.reader import Reader
from twoaxis.ops import mix, traced
from twoaxis.ops.known_mix import softmaxed
from twoaxis.tape import Array, Tape

Normalize = Literal["softmax", "none"]


def n_weights(n_sources: int, normalize: str) -> int:
    """How many numbers a mix of n sources learns; a softmax over one source is 1 and learns nothing."""
    return 0 if normalize == "softmax" and n_sources == 1 else n_sources


class StaticMix(nn.Module):
    """x = sum_i alpha_i h_i with alpha = softmax(a), or alpha = a.

    seen: the depth indices of the n sources, without a gap. a (n,), oldest source first, starts at 0 under
    softmax (all sources alike) and at 1 without it (their sum), or with `newest` at 0 but for a 1 at the
    newest source.
    """

    def __init__(self, seen: range, normalize: Normalize, newest: bool = False) -> None:
        super().__init__()
        self.normalize, self.seen, n_sources = normalize, seen, len(seen)
        start = torch.full((n_sources,), 0.0 if normalize == "softmax" or newest else 1.0)
        start[-1] = 1.0 if newest else start[-1]
        self.logits = nn.Parameter(start) if n_weights(n_sources, normalize) else None

    def known_weights(self) -> tuple[Tensor, bool] | None:
        """The parameter, and whether the weights are its softmax: see `ops/known_mix.py`."""
        return None if self.logits is None else (self.logits, self.normalize == "softmax")

    def forward(self, sources: History) -> Tensor:
        """(B, T, d) from sources like it, weighed by their depth index: all n of them, or some."""
        if self.logits is None:
            return sources.sources[0]
        alpha = softmaxed(self.logits) if self.normalize == "softmax" else self.logits
        if len(sources) != len(alpha):
            alpha = alpha[[self.seen.index(j) for j in sources.index]]
        return mix(sources.sources, alpha)


class MixReader(Reader):
    """A reader by one `StaticMix`, `mix`, of the sources `seen`."""

    weights = "mix"
    mix: StaticMix | None
    seen: range

    def wants(self, index: int) -> bool:
        return index in self.seen

    def weigh(self, sources: History) -> tuple[Tensor, ...]:
        assert self.mix is not None
        return (self.mix(sources),)


def static_mix_trace(t: Tape, sources: Sequence[Array], normalize: str) -> Array:
    """A `StaticMix` in sizes alone."""
    if not n_weights(len(sources), normalize):
        return sources[0]
    if normalize == "none":
        return traced.mix(t, sources, known=True)
    shares = t.table(len(sources))
    shares = t.run("softmax", (t.weight(len(sources)),), shares, keep=(shares,))
    return traced.mix(t, sources, [shares], known=True)
