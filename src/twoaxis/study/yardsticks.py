"""What general compressors reach on a text: the floor below which a model has learned something."""

from __future__ import annotations

import lzma
import math
import zlib
from collections import Counter
from functools import lru_cache

from twoaxis.data import load_corpus
from twoaxis.errors import InputError


@lru_cache(maxsize=4)
def yardsticks(data: str, valid_fraction: float) -> dict[str, float]:
    """Bits per byte of the validation text by byte frequencies, gzip -9 and xz -9e, and its "bytes".

    Empty if the text is gone or has no validation part.
    """
    try:
        raw = "".join(load_corpus(data, valid_fraction).valid).encode()
    except InputError:
        return {}
    if not raw:
        return {}
    n = len(raw)
    entropy = -sum(c / n * math.log2(c / n) for c in Counter(raw).values())
    deflated = zlib.compressobj(9, wbits=31)  # 31: with the header of gzip
    gzip = len(deflated.compress(raw)) + len(deflated.flush())
    xz = len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    return {"bytes": n, "byte entropy": entropy, "gzip -9": 8 * gzip / n, "xz -9e": 8 * xz / n}
