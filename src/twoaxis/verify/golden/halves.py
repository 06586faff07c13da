"""Attention with recorded angles, for stacks whose methods work between its two halves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.ops import local_attention
from twoaxis.sequence import Attention
from twoaxis.types import Context, Layout
from twoaxis.verify.golden.case import Case


class Turned(Attention):
    """Full attention that turns q and k by the cos and sin it is given, each (.., T, D)."""

    turning: tuple[Tensor, Tensor]
    name: str | None = None  # the output that the file records
    case: Case

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (self.turn(q), self.turn(k), v))
        y: Tensor = self.out(local_attention(q, k, v, None).transpose(1, 2).flatten(2))
        if self.name is not None:
            self.case.output(self.name, y)
        return y

    def turn(self, x: Tensor) -> Tensor:
        """x (B, T, H, D) rotated in pairs (i, i + D / 2)."""
        cos, sin = (a.unsqueeze(-2) for a in self.turning)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def turned(
    case: Case, layout: Layout, block: int, cos: Tensor, sin: Tensor, name: str | None = None, **options: Any
) -> Turned:
    """One with the model's heads; `name` is the output to record."""
    core = Turned(spec.parse_spec("sequence", "attention"), layout, block, **options)
    core.turning, core.case, core.name = (cos, sin), case, name
    return core
