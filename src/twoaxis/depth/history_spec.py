"""How a model keeps the earlier layers that its depth method reads: one line, chosen beside the method.

history="full"                  as they are
history="int8"                  or "bfloat16", "float16": in fewer bits (see `stored.py`)
history="recompute"             nothing is kept for backward, which runs the network again
history="window(4)"             reads see the newest 4 sources: the method's own option, under its general name
history="block_sums(3)"         the same for sums of sublayers or blocks
history="window(4), int8"       parts combine
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from twoaxis.depth.stored import STORED_DTYPES
from twoaxis.errors import InputError

if TYPE_CHECKING:
    from twoaxis.depth.connection import DepthConfig

ALLOWED = (
    f"full, {', '.join(STORED_DTYPES)}, recompute, window(K), block_sums(G), or several with commas between"
)


@dataclass(frozen=True, kw_only=True)
class HistorySpec:
    """dtype: that sources are kept in, "full" is the state's. recompute: keep nothing between forward and backward.
    window, block_sums: the number given to the method's own option, or None.
    """

    dtype: str = "full"
    recompute: bool = False
    window: int | None = None
    block_sums: int | None = None

    def text(self) -> str:
        """The line that parses to this."""
        parts = [
            f"{name}({n})" for name in ("window", "block_sums") if (n := getattr(self, name)) is not None
        ]
        parts += [self.dtype] if self.dtype != "full" else []
        return ", ".join([*parts, *(["recompute"] if self.recompute else [])]) or "full"


def parse_history(text: str) -> HistorySpec:
    """The inverse of `HistorySpec.text`; InputError in one line for anything else."""
    if not isinstance(text, str):
        raise InputError(f"history={text!r}: allowed is {ALLOWED}")
    found: dict[str, Any] = {}
    for part in (p.strip() for p in text.split(",")):
        called = re.fullmatch(r"(window|block_sums)\(([0-9]{1,9})\)", part)
        if called:
            name, value = called[1], cast(Any, int(called[2]))
        elif part in (*STORED_DTYPES, "full"):
            name, value = "dtype", part
        elif part == "recompute":
            name, value = "recompute", True
        else:
            raise InputError(f"history={text!r}: {part!r} is not known; allowed is {ALLOWED}")
        if name in found or value == 0:
            wrong = f"{name} is given twice" if name in found else f"{name} is 1 or more"
            raise InputError(f"history={text!r}: {wrong}; allowed is {ALLOWED}")
        found[name] = value
    return HistorySpec(**found)


def settled(depth: DepthConfig, history: HistorySpec) -> tuple[DepthConfig, HistorySpec]:
    """The method with the window or block sums as its own options, and the history without them.

    Raises InputError for a method that keeps no history, has no such option, or was given it in its spec.
    """
    asked = {k: n for k in ("window", "block_sums") if (n := getattr(history, k)) is not None}
    if history != HistorySpec() and not depth.keeps_history:
        raise InputError(f"history={history.text()!r}: {depth.name} keeps no history; allowed is 'full'")
    for kind, count in asked.items():
        options = depth.history_options(kind, count)
        if not options:
            raise InputError(f"history='{kind}({count})': {depth.name} has no such option; leave it out")
        fields = {f.name: f.default for f in dataclasses.fields(depth)}
        taken = [k for k, v in options.items() if getattr(depth, k) not in (fields[k], v)]
        if taken:
            given = f"{taken[0]}={getattr(depth, taken[0])!r}"
            raise InputError(
                f"history='{kind}({count})': {depth.name} was given {given} already; give one of them"
            )
        depth = dataclasses.replace(depth, **options)
    return depth, dataclasses.replace(history, window=None, block_sums=None)
