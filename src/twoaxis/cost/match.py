"""Models of equal cost: widen or narrow the MLPs until a count meets a target."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from twoaxis.cost.total import cost
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.sequence.mixer import SequenceConfig
from twoaxis.types import Layout

Budget = Literal["parameters", "flops"]
CLOSE = 0.005  # a coarser step of widths is kept where it misses the target by no more than this


def budget_of(cfg: ModelConfig, budget: Budget, batch_size: int = 1, seq_len: int = 512) -> int:
    """The count that a budget names: "parameters", or "flops" of a training step at this size."""
    if budget not in get_args(Budget):
        raise InputError(f"budget={budget!r}: allowed is {' or '.join(map(repr, get_args(Budget)))}")
    total = cost(cfg, batch_size, seq_len)
    return total.parameters if budget == "parameters" else total.flops


def mismatch(cfg: ModelConfig, budget: Budget, target: int, batch_size: int = 1, seq_len: int = 512) -> float:
    """How far a model is from a target, as a fraction of it: 0.01 is 1 % too much."""
    return budget_of(cfg, budget, batch_size, seq_len) / target - 1


def match_mlp(
    cfg: ModelConfig, budget: Budget, target: int, batch_size: int = 1, seq_len: int = 512
) -> ModelConfig:
    """The same model with MLPs as wide as brings its count closest to `target`.

    All MLPs change by one factor, so those of equal width stay equal. Widths are multiples of 8 where that
    comes within 0.5 %, else of 4, 2 or 1; `mismatch` tells what is left. Raises InputError for a model
    without an MLP and for a target that it exceeds with MLPs of width 1.
    """
    layout, blocks = cfg.layout(), cfg.block_configs()
    widest = max((w for cores in blocks for core in cores for w in _widths(core, layout)), default=0)
    if not widest:
        raise InputError(f"sequence={cfg.sequence} has no mlp to adjust; add 'mlp' or do not match budgets")

    def at(width: int, step: int = 1) -> ModelConfig:
        lists = [[_scaled(core, layout, width / widest, step).spec() for core in cores] for cores in blocks]
        same = all(isinstance(s, str) for s in cfg.sequence)
        return dataclasses.replace(cfg, sequence=lists[0] if same else lists)

    def count(width: int, step: int = 1) -> int:
        return budget_of(at(width, step), budget, batch_size, seq_len)

    if count(1) > target:
        raise InputError(
            f"{budget}={target} cannot be met: {cfg.depth} has {count(1)} with MLPs of width 1; raise it"
        )
    low, high = 1, 2  # count(low) <= target < count(high)
    while count(high) <= target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= target else (low, middle)

    def miss(width: int, step: int) -> float:
        return abs(count(width, step) / target - 1)

    for step in (8, 4, 2, 1):
        below = low // step * step
        width = min((max(below, step), below + step), key=lambda width: miss(width, step))
        if miss(width, step) <= CLOSE:
            break
    return at(width, step)


def _widths(core: Any, layout: Layout) -> list[int]:
    """The inner widths of a core's MLPs, those of cores inside it included."""
    if hasattr(core, "hidden_width"):
        return [core.hidden_width(layout)]
    return [w for part in _parts(core) for w in _widths(part, layout)]


def _scaled(core: Any, layout: Layout, factor: float, step: int) -> SequenceConfig:
    """The core with its MLPs' widths times `factor`, rounded to multiples of `step`."""
    if hasattr(core, "hidden_width"):
        return dataclasses.replace(
            core, hidden=max(1, round(core.hidden_width(layout) * factor / step)) * step
        )
    parts = [_scaled(part, layout, factor, step).spec() for part in _parts(core)]
    return dataclasses.replace(core, **{core.specs_field: tuple(parts)}) if parts else core


def _parts(core: Any) -> list[Any]:
    """The cores that a core is made of; none for a plain one."""
    return core.parts() if core.specs_field else []
