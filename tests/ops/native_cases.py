"""What the tests of native kernels share."""

import pytest

from twoaxis.ops import choice


def needs_kernel(name: str):
    """Skip where the kernel cannot be built; the tests of the build say that this is allowed."""
    return pytest.mark.skipif(choice.library(name) is None, reason=f"{name} cannot be built here")


class Counting:
    """A kernel's library that counts its calls."""

    def __init__(self, library) -> None:
        self.library, self.calls = library, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.library, name)
