"""What the tests of native kernels share."""

import pytest

from twoaxis.ops import choice
from twoaxis.ops.native import build


def needs_kernel(name: str):
    """Skip where there is no compiler or no processor for it; one that the compiler refuses is a failure."""
    reason = choice.missing(name)
    return pytest.mark.skipif(bool(reason) and build.REFUSED not in reason, reason=reason)


class Counting:
    """A kernel's library that counts its calls."""

    def __init__(self, library) -> None:
        self.library, self.calls = library, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.library, name)
