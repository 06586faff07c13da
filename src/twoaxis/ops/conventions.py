"""What other libraries mean by the number they call a window: one table, to convert at every border.

Here a window w counts the query's own token: query t reads keys t-w+1 .. t. Each row below says which
number n the library takes for that, n = w + shift. Rows were read in the libraries' sources, and where they
run on a CPU measured; `docs/guides/windows.md` is this table in words.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError
from .window import check_window


@dataclass(frozen=True)
class Convention:
    """The number n = w + shift of a library for our window w; full: what it takes for no window at all."""

    shift: int
    full: int | None
    meaning: str


CONVENTIONS = {
    "transformers": Convention(0, None, "config.sliding_window: keys seen, the current one included"),
    "vllm": Convention(0, None, "sliding_window: keys seen, the current one included"),
    "xformers-causal": Convention(
        0, None, "LowerTriangularFromBottomRightLocalAttentionMask: keys seen, current one included"
    ),
    "xformers-local": Convention(
        -1, None, "LocalAttentionFromBottomRightMask(window_left, 0): keys before the current one"
    ),
    "flash-attention": Convention(
        -1, -1, "window_size=(n, 0): keys before the current one; queries are the last ones"
    ),
    "torch-varlen": Convention(-1, -1, "window_size=(n, 0), as in flash-attention"),
    "nanochat": Convention(-1, -1, "(n, 0), handed to flash-attention; modded-nanogpt too"),
    "local-attention": Convention(
        -1, None, "exact_windowsize=True, causal: window_size * look_backward, keys before the current"
    ),
}


def window_for(library: str, window: int | None) -> int | None:
    """The number a library takes for our window; None is no window at all."""
    convention, window = _convention(library), check_window(window)
    return convention.full if window is None else window + convention.shift


def window_from(library: str, number: int | None) -> int | None:
    """Our window for a library's number; None when the number means no window at all."""
    convention = _convention(library)
    if number is None or number == convention.full:
        return None
    return check_window(number - convention.shift)


def _convention(library: str) -> Convention:
    if library not in CONVENTIONS:
        raise InputError(f"library {library!r} is not in the table; known: {', '.join(CONVENTIONS)}")
    return CONVENTIONS[library]
