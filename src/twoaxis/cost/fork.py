"""The duality paper's fork (arXiv 2603.16039): what to take first and second for a goal, before any numbers.

After the paper's two choices come cheaper points that serve the same goal, ours, for machines on which neither is
worth its price; the standard Transformer is always last.
"""

from __future__ import annotations

from typing import Literal, get_args

from twoaxis.cost.rows import Point
from twoaxis.errors import InputError, nearest

Goal = Literal["shortcut", "local-mixing", "depth-retrieval", "best-quality", "any"]

WORDS: dict[str, str] = {
    "shortcut": "The paper: for a better shortcut take DDL, which keeps no earlier layers but multiplies the stream "
    "when its state is expanded (value_dim > 1); second, Hyper-Connections.",
    "local-mixing": "The paper: for local content-adaptive mixing take ShortSWA along the sequence; second, a depth "
    "read. It sees no general case for repackaging local mixing as a depth mechanism.",
    "depth-retrieval": "The paper: depth reads are for when cross-depth retrieval itself is the object; earlier states "
    "must then be kept, forwarded or recomputed at every block. First the full read, second block sums.",
    "best-quality": "The paper's two recommendations together, one an axis: DDL and ShortSWA; second, "
    "Hyper-Connections and ShortSWA. It has no experiment on this.",
    "any": "The paper's two recommendations together, one an axis: DDL, which keeps no earlier layers, and ShortSWA; "
    "then either alone.",
}


def candidates(goal: Goal, window: int) -> list[Point]:
    """The points to try for a goal, in order: the paper's first and second choice, then cheaper ones."""
    swa, conv = (f"short_swa(window={window})",), ("short_conv",)
    both = [Point("ddl", swa), Point("hyper_connections", swa)]
    shortcuts = [Point("ddl"), Point("hyper_connections"), Point("residual_scalars")]
    table: dict[str, list[Point]] = {
        "shortcut": shortcuts,
        "local-mixing": [
            Point("additive", swa),
            Point("depth_window(window_blocks=4)"),
            *(Point("additive", local) for local in (conv, ("token_shift",))),
        ],
        "depth-retrieval": [
            Point("attnres"),
            Point("attnres(block_sublayers=6)"),
            Point("denseformer(dilation=4, period=5)"),
            Point("value_residual"),
        ],
        "best-quality": [*both, Point("ddl", conv), *shortcuts],
        "any": [both[0], Point("ddl"), Point("additive", swa), Point("ddl", conv), *shortcuts[1:]],
    }
    return [*table[goal], Point()]


def check_goal(goal: str) -> Goal:
    """The goal; InputError for an unknown one."""
    known = get_args(Goal)
    if goal not in known:
        raise InputError(f"goal {goal!r} is not known; {nearest(goal, known)}")
    return goal  # type: ignore[return-value]


def others(window: int) -> list[Point]:
    """The rest of the table: every registered depth method, the paper's combinations, local mixers."""
    from twoaxis import spec

    swa = (f"short_swa(window={window})",)
    return [
        *(Point(name) for name in spec.methods("depth")),
        Point("ddl(value_dim=4)"),
        Point("attnres(block_sublayers=6)"),
        Point("denseformer(dilation=4, period=5)"),
        Point("depth_window(window_blocks=4)"),
        *(Point("additive", local) for local in (swa, ("short_conv",), ("canon",), ("token_shift",))),
        *(Point(depth, swa) for depth in ("ddl", "hyper_connections", "attnres(block_sublayers=6)")),
    ]
