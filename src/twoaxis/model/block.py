"""A block: its sublayers' connections and cores, in order. It never asks which method it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from twoaxis.depth.connection import Connection, State
from twoaxis.sequence.mixer import Mixer
from twoaxis.types import Context


class Block(nn.Module):
    """state -> state through every sublayer.

    state ── connection_1(core_1) ── connection_2(core_2) ── ... ── state
    """

    def __init__(self, connections: Sequence[Connection], cores: Sequence[Mixer]) -> None:
        super().__init__()
        self.connections = nn.ModuleList(connections)
        self.cores = nn.ModuleList(cores)

    def forward(self, state: State, ctx: Context, around: Callable[[Any], Any] | None = None) -> State:
        """around: what stands in each core's place, made of the core (see `saving.py`)."""
        for connection, core in zip(self.connections, self.cores, strict=True):
            state = connection(state, core if around is None else around(core), ctx)
        return state
