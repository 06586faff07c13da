"""Numbers as people read them: 1.31M, 4.2 MiB, 3.1 min."""

from __future__ import annotations

import math
import re

SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, digits: int = 3) -> str:
    """A count with an SI letter and `digits` significant digits: 1310720 is "1.31M"."""
    for scale, letter in SI:
        if abs(value) >= scale * (1 - 0.5 * 10**-digits):
            return f"{_significant(value / scale, digits)}{letter}"
    return _significant(value, digits)


def short(value: float) -> str:
    """A count as `si` has it, without zeros at its end: 2000 is "2k"."""
    number, letter = re.fullmatch(r"(.*?)([A-Z]|k)?", si(value)).groups()  # type: ignore[union-attr]
    return (number.rstrip("0").rstrip(".") if "." in number else number) + (letter or "")


def mebibytes(count: float) -> str:
    """Bytes as B, KiB, MiB or GiB."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{_significant(count / 1024**power, 3)} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def percent(fraction: float) -> str:
    """A signed share: 0.123 is "+12.3%"."""
    return f"{100 * fraction:+.1f}%"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside low .. high."""
    raw = (high - low) / about
    if not raw > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _significant(value: float, digits: int) -> str:
    if abs(value) < 1e-3:
        return f"{value:.{digits}g}"
    value = float(f"{value:.{digits - 1}e}")  # 9.999 has the places of 10.0
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"
