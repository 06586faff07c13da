"""Errors a user can act on."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: one line saying what was given, what is allowed and what to do.

    The command line prints the message alone and exits with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on (NaN loss, full disk, damaged file): one line with what happened and what is left.

    The command line prints the message alone and exits with code 1.
    """


def nearest(given: str, allowed: Iterable[str]) -> str:
    """'did you mean X? known: ...' for an error line."""
    names = list(allowed)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
