"""A parallel layout in one line: `dp=8,tp=2,pp=4,cp=1`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from twoaxis.errors import InputError, nearest
from twoaxis.model.config import ModelConfig

SOUGHT = 1 << 16  # up to where a number that divides is looked for


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along four axes: dp copies of the model, tp slices of each product, pp stages of blocks, cp parts
    of each sequence."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """From `dp=8,tp=2`; axes left out are 1. InputError for anything else."""
        names = [f.name for f in fields(cls)]
        found: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            match = re.fullmatch(r"(\w+)=([0-9]{1,9})", part)
            if not match or match[1] not in names:
                name = part.split("=")[0].strip()
                said = f"an axis has 1 to {'9' * 9} devices" if name in names else nearest(name, names)
                raise InputError(
                    f"mesh {text!r}: {part!r} is no axis with a number; {said}; as in dp=8,tp=2,pp=4,cp=1"
                )
            if match[1] in found or int(match[2]) < 1:
                raise InputError(f"mesh {text!r}: give each axis once, as 1 or more")
            found[match[1]] = int(match[2])
        return cls(**found)

    def check(self, model: ModelConfig, seq_len: int) -> None:
        """InputError, in one line, for an axis that does not divide what it splits."""
        kv = model.n_kv_heads or model.n_heads
        splits = (
            ("pp", self.pp, "n_blocks", model.n_blocks),
            ("tp", self.tp, "n_heads", model.n_heads),
            ("tp", self.tp, "n_kv_heads", max(kv, self.tp)),  # fewer heads than slices are copied
            ("cp", self.cp, "seq_len", seq_len),
        )
        for axis, parts, name, whole in splits:
            if whole % parts:
                fits = [n for n in range(1, min(whole, SOUGHT) + 1) if whole % n == 0]
                near = min(fits, key=lambda n: abs(n - parts))
                raise InputError(
                    f"mesh {self}: {axis}={parts} does not divide {name}={whole}; the nearest is {axis}={near}"
                )
