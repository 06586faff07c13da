"""Who reads whom, as a table of marks, and the tiny modules that are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS = 12, 2
FROM_THE_START, ONCE_TRAINED, NEVER, ABSENT = "#", "o", ".", " "
NOISE = 1e-10  # of a row's largest gradient: what rounding leaves of a zero

Sizes = dict[str, float]  # of a row: column -> size of the gradient


@dataclass(frozen=True)
class Links:
    """marks: a text for each row with a sign for each column.

    "#": read from the start (as a fresh model is); "o": read at a random point of its parameters, not at
    the start; ".": not read; " ": there is no such tensor yet.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    marks: tuple[str, ...]


def marks(columns: Sequence[str], start: Sizes, anywhere: Sizes) -> str:
    """The marks of one row, from its gradients in a fresh module and at a random point."""

    def mark(column: str) -> str:
        if column not in anywhere:
            return ABSENT
        if start[column] > NOISE * max(start.values()):
            return FROM_THE_START
        return ONCE_TRAINED if anywhere[column] > NOISE * max(anywhere.values()) else NEVER

    return "".join(map(mark, columns))


def leaf(tokens: int) -> Tensor:
    """Random numbers (1, T, d) to ask for a gradient."""
    return torch.randn(1, tokens, WIDTH, dtype=torch.float64, requires_grad=True)


def at_a_point(module: nn.Module, random: bool) -> Any:
    """The module in float64, moved away from its start if asked."""
    module.double()
    with torch.no_grad():
        for p in module.parameters() if random else ():
            p.add_(torch.randn_like(p), alpha=0.1)
    return module
