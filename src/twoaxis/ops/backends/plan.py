"""Which queries meet which keys in the blocked window, and how much work that is."""

from typing import NamedTuple

from ..window import check_window

# Best block length by window, measured on CPUs (float32, head dims 32 and 64); beyond the last window, 64.
_BLOCKS = ((16, 16), (64, 32))
_ALIGN = (
    8  # spans start at a multiple of this: reductions over whole vector registers are several times faster
)


class Block(NamedTuple):
    """Queries start..stop-1 (from the first query) meet keys first..last-1 (from the first kept key)."""

    start: int
    stop: int
    first: int
    last: int

    @property
    def scores(self) -> int:
        """Scores computed per query head, the masked ones included."""
        return (self.stop - self.start) * (self.last - self.first)


def kept_keys(Tq: int, Tk: int, window: int | None) -> int:
    """How many of the newest keys the last Tq of Tk positions can see at all."""
    return Tk if window is None else min(Tk, window + Tq - 1)


def block_plan(Tq: int, window: int | None, Tk: int | None = None) -> tuple[Block, ...]:
    """The blocks for the last Tq of Tk positions (Tk = Tq when not given).

    A block of C queries spans C + window - 1 keys (up to alignment), so the scores are linear in Tq. A decode
    step is one block against exactly the keys it sees.
    """
    window = check_window(window)
    Tk = Tq if Tk is None else Tk
    kept = kept_keys(Tq, Tk, window)
    w, offset = min(window or Tk, Tk), kept - Tq
    C = next((block for limit, block in _BLOCKS if w <= limit), 64)
    return tuple(
        Block(
            start,
            stop := min(start + C, Tq),
            max(0, offset + start - w + 1) // _ALIGN * _ALIGN,
            offset + stop,
        )
        for start in range(0, Tq, C)
    )
