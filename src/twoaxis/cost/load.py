"""What a predicted step runs: micro-batches, tokens, dtype, phase, execution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from twoaxis.cost.works import Execution
from twoaxis.errors import InputError
from twoaxis.types import DTYPES


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is run: micro-batches of `batch_size` rows of `seq_len` tokens, m of them in a step.

    decoding: one token of each row, with the rows before it cached. checkpointing: blocks are recomputed.
    """

    batch_size: int = 1
    seq_len: int = 2048
    micro_batches: int = 8
    dtype: str = "bfloat16"
    decoding: bool = False
    execution: Execution = "fused"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "micro_batches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}={value!r}: allowed is an integer of 1 or more")
        if self.execution not in get_args(Execution):
            raise InputError(
                f"execution={self.execution!r}: allowed is {', '.join(map(repr, get_args(Execution)))}"
            )
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r}: allowed is {' or '.join(DTYPES)}")
