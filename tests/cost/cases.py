"""The registry's configurations, and for costs a window wider than the row and free block lists."""

from __future__ import annotations

import pytest

import configurations
import twoaxis

METHODS = list(twoaxis.methods("depth"))
QUICK = set(configurations.pairwise())
SEQUENCES = {**configurations.SEQUENCES, "wide window": ["short_swa(window=40)", "mlp"]}


def full(value: object) -> object:
    """A parameter of the full tier."""
    return pytest.param(value, marks=pytest.mark.full)


CASES = [case if case in QUICK else full(case) for case in configurations.whole()]
DEPTHS = [depth if depth in METHODS else full(depth) for depth in configurations.depths()]


def config(
    depth: str = "additive", sequence: str | list = "standard", **fields: object
) -> twoaxis.ModelConfig:
    """A tiny model; `sequence` is a key of SEQUENCES or a block list."""
    blocks = SEQUENCES[sequence] if isinstance(sequence, str) else sequence
    given = {"vocab_size": 37, "d_model": 24, "n_blocks": 3, "n_heads": 2, "depth": depth}
    return twoaxis.ModelConfig(**{**given, "sequence": blocks, **fields})  # type: ignore[arg-type]
