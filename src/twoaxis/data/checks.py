"""Checks of plain arguments, each failing with one line that teaches."""

from collections.abc import Iterable
from difflib import get_close_matches

from twoaxis.errors import InputError


def whole(name: str, value: object, least: int) -> int:
    """`value` if it is an integer (not a bool) of at least `least`; else InputError naming the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return int(value.__index__())


def choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """`value` if it is one of `allowed`; else InputError listing them and the nearest."""
    options = list(allowed)
    if isinstance(value, str) and value in options:
        return value
    raise InputError(f"{name} must be one of {', '.join(options)}, not {value!r}{nearest(value, options)}")


def nearest(value: object, options: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the option that `value` is closest to, or an empty string."""
    close = get_close_matches(str(value), list(options), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
