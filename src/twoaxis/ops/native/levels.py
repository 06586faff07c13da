"""Which of the processor's instructions kernels may use: TWOAXIS_NATIVE, or the best that this processor has.

    amx       avx512, and matrix tiles of bfloat16 for attention where they prove right (`tiles.py`)
    avx512    vectors of 16 floats
    avx2      vectors of 8 floats and fused multiply-adds
    plain     what every x86-64 processor has

It is settled at the first kernel of a process; `twoaxis verify --backends` shows it.
"""

import functools
import os
from pathlib import Path

from ...errors import InputError

_AVX2 = ("-mavx2", "-mfma", "-mbmi2", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
FLAGS = {"amx": _AVX512, "avx512": _AVX512, "avx2": _AVX2, "plain": ()}  # of a compiler, best level first
TILES = ("-mamx-tile", "-mamx-bf16")
_NEEDS = {
    "amx": {"amx_tile", "amx_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "fma", "bmi2", "f16c"},
    "plain": set[str](),
}


def level() -> str:
    """The level that kernels are built for. Raises InputError for a TWOAXIS_NATIVE that is unknown or not here."""
    asked, here = os.environ.get("TWOAXIS_NATIVE"), available()
    if asked and asked not in FLAGS:
        raise InputError(f"TWOAXIS_NATIVE={asked!r}: give one of {', '.join(FLAGS)}, or leave it out")
    if asked and asked not in here:
        raise InputError(
            f"TWOAXIS_NATIVE={asked!r}: this processor has {', '.join(here)}; give one of these, or leave it out"
        )
    return asked or here[0]


def available() -> tuple[str, ...]:
    """The levels that this processor has, best first: what one needs, and what all below it need."""
    words, found = set(features().split()), ["plain"]
    for name in ("avx2", "avx512", "amx"):
        if not _NEEDS[name] <= words:
            break
        found.insert(0, name)
    return tuple(found)


@functools.cache
def features() -> str:
    """What the processor can do, as Linux lists it; "" where it lists nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
