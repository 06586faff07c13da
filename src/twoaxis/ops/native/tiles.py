"""Attention in bfloat16 by the processor's matrix tiles (Intel's AMX): where they are, may be used, and prove right.

A kernel of tiles is settled once a process, at the first call that it could take: built for the level "amx"
(`levels`), permitted by Linux, and compared with the kernel of vectors on a small input. Where one of these fails, all
calls go to the vectors, after one logged line where the processor has tiles.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import levels
from .build import UnavailableError
from .build import library as built

BOUND = (
    0.02  # of the difference, relative to the largest entry: results and probabilities are rounded to 2^-9
)
Results = Callable[[ctypes.CDLL], Sequence[Tensor]]
log = logging.getLogger(__name__)
_lock = threading.Lock()
_settled: list["ctypes.CDLL | str"] = []  # the library, or why there is none


def chosen(vectors: ctypes.CDLL, results: Results) -> ctypes.CDLL:
    """The kernel of tiles, else `vectors`. results: what a library computes on a small input."""
    found = settle(vectors, results)
    return vectors if isinstance(found, str) else found


def settle(vectors: ctypes.CDLL, results: Results) -> "ctypes.CDLL | str":
    """The kernel of tiles, or why there is none."""
    if not _settled:
        with _lock:
            if not _settled:
                _settled.append(_find(vectors, results))
    return _settled[0]


def _find(vectors: ctypes.CDLL, results: Results) -> "ctypes.CDLL | str":
    if levels.level() != "amx":
        lacks = "amx" not in levels.available()
        return "this processor has no matrix tiles" if lacks else "TWOAXIS_NATIVE asks for less"
    found = _proven(vectors, results)
    if isinstance(found, str):
        log.warning("attention in bfloat16 runs without matrix tiles: %s", found)
    return found


def _proven(vectors: ctypes.CDLL, results: Results) -> "ctypes.CDLL | str":
    try:
        found = built("local_attention_tiles", (*levels.FLAGS["amx"], *levels.TILES))
    except UnavailableError as reason:
        return str(reason)
    if not found.local_attention_permitted():
        return "the system does not permit them"
    for one, other in zip(results(found), results(vectors), strict=True):
        error = ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()
        if not error <= BOUND:
            return f"they differ from vectors by {error:.1e} of the largest entry, more than {BOUND}"
    return found


def sample() -> tuple[Tensor, ...]:
    """q (1, 2, 70, 40), k, v (1, 1, 70, 40) and the output's gradient: of odd sizes, the same every time."""
    entries = torch.arange(6 * 70 * 40, dtype=torch.float64)
    waves = (3 * torch.sin(0.37 * entries**2)).bfloat16().view(1, 6, 70, 40)
    q, k, v, dout = waves.split((2, 1, 1, 2), 1)
    return q, k, v, dout
