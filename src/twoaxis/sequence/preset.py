"""Presets: an item of a block list that makes the block out of its other items.

["canon(set='AC')", "attention", "mlp(hidden=64)"]  ->  ["attention(input='canon')", "mlp(hidden=64, input='canon')"]
"""

from __future__ import annotations

from collections.abc import Sequence

from twoaxis.errors import InputError
from twoaxis.sequence.mixer import SequenceConfig
from twoaxis.types import Cost, Shape


def carried_out(block: Sequence[SequenceConfig]) -> list[SequenceConfig]:
    """The sublayers of a block list, its presets carried out, the last one first."""
    for index, item in enumerate(block):
        others = [*block[:index], *block[index + 1 :]]
        if item.over([]) is not None:
            made = item.over(carried_out(others))
            assert made is not None
            return made
    return list(block)


def block_cost(block: Sequence[SequenceConfig], shape: Shape) -> Cost:
    """Counts of all sublayers of a block."""
    return sum((core.cost(shape) for core in block), start=Cost())


def refuse_as_core(cfg: SequenceConfig) -> None:
    """A preset is not a core: say where it belongs."""
    if cfg.over([]) is not None:
        raise InputError(f"{cfg.spec()} makes a whole block: give it as an item of a block list")
