"""The registry's configurations, and for costs a window wider than the row and free block lists."""

from __future__ import annotations

import configurations
import twoaxis

DEPTHS = configurations.depths()
SEQUENCES = {**configurations.SEQUENCES, "wide window": ["short_swa(window=40)", "mlp"]}


def config(
    depth: str = "additive", sequence: str | list = "standard", **fields: object
) -> twoaxis.ModelConfig:
    """A tiny model; `sequence` is a key of SEQUENCES or a block list."""
    blocks = SEQUENCES[sequence] if isinstance(sequence, str) else sequence
    given = {"vocab_size": 37, "d_model": 24, "n_blocks": 3, "n_heads": 2, "depth": depth}
    return twoaxis.ModelConfig(**{**given, "sequence": blocks, **fields})  # type: ignore[arg-type]
