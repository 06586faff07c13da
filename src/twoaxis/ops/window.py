"""Who sees whom: the one definition of the window that every backend, cache and cost is held to.

The window counts the current position: position p reads positions max(0, p - window + 1) .. p.
"""

from numbers import Integral

import torch
from torch import Tensor

from ..errors import InputError


def check_window(window: object, name: str = "window") -> int | None:
    """The window as an int >= 1, or None for full causal; anything else is refused.

    Raises InputError for bools, zero, negatives, floats and strings.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
        raise InputError(
            f"{name}={window!r}: give an integer >= 1 (it counts the current position) or None (full)"
        )
    return int(window)


def visible(
    Tq: int,
    Tk: int,
    window: int | None,
    segments: Tensor | None = None,
    sink_tokens: int = 0,
    reach: Tensor | None = None,
) -> Tensor:
    """The boolean mask of a window: True where a query (row) may read a key (column).

    Queries are the last Tq of Tk positions. Query p sees key s iff 0 <= p - s < window, or s <= p and s is
    among the first `sink_tokens` tokens of the query's segment. With `segments` (B, Tk) both must carry the
    same id, and an id below 0 is padding that sees and is seen by nobody.

    `reach` (Tq,) or (B, Tq) is a window of each query's own, where that is shorter.

    Returns (Tq, Tk), or (B, Tq, Tk) with segments or a reach by row. O(Tq Tk): the oracle.
    """
    window = check_window(window)
    if not 0 <= Tq <= Tk:
        raise InputError(f"Tq={Tq}, Tk={Tk}: the queries are the last Tq of Tk positions, so 0 <= Tq <= Tk")
    device = None if segments is None else segments.device
    key = torch.arange(Tk, device=device)
    query = key[Tk - Tq :, None]  # (Tq, 1), absolute positions
    causal = key <= query
    near = causal if window is None else causal & (query - key < window)
    if reach is not None:
        near = near & (query - key < reach[..., None])
    if segments is None:
        return near | (causal & (key < sink_tokens)) if sink_tokens else near
    same = segments[:, None, :] == segments[:, Tk - Tq :, None]  # (B, Tq, Tk)
    if sink_tokens:
        near = near | (causal & (segment_order(segments)[2] < sink_tokens)[:, None, :])
    return near & same & (segments >= 0)[:, None, :]


def segment_order(segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens sorted by segment, then by position, in O(T log T): (B, T) ids -> three (B, T) integer tensors.

    Returns order (the position at each place), place (the place of each position) and rank (how many earlier
    tokens of the row carry the same id).
    """
    ids, order = segments.sort(dim=1, stable=True)
    at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = torch.where(begins, at, 0).cummax(dim=1).values if ids.numel() else at
    place = torch.empty_like(order).scatter_(1, order, at)
    return order, place, (at - begin).gather(1, place)


def visible_pairs(T: int, window: int | None) -> int:
    """The number of True entries of `visible(T, T, window)`: w T - w (w - 1) / 2 for w <= T."""
    window = check_window(window)
    w = T if window is None else min(window, T)
    return w * T - w * (w - 1) // 2
