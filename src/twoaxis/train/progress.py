"""How far a run is."""

from dataclasses import dataclass


@dataclass
class Progress:
    """Counters of a run. seconds: spent in steps, without validation and saving."""

    step: int = 0
    tokens: int = 0  # input tokens
    flops: int = 0  # forward and backward
    seconds: float = 0.0
