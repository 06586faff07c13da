"""A fixture of the tests of native kernels."""

import pytest
from native_cases import Counting

from twoaxis.ops import choice


@pytest.fixture
def counting(monkeypatch):
    """Replaces a kernel's library by one that counts."""

    def replace(name: str) -> Counting:
        library = Counting(choice.library(name))
        monkeypatch.setitem(choice._found, name, library)
        return library

    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    return replace
