"""Fixtures of the tests of operators, and flags for a whole run of them (see test_native_levels.py)."""

import os

import pytest
from native_cases import Counting

from twoaxis.ops import choice, rebuilt
from twoaxis.ops.native import build

build.FLAGS = (*build.FLAGS, *os.environ.get("KERNEL_FLAGS", "").split())


@pytest.fixture
def pushed(monkeypatch):
    """Runs something with operators that are differentiated by themselves, outside of any loop."""

    def run(f):
        with monkeypatch.context() as patch:
            patch.setattr(rebuilt, "current", lambda: None)
            return f()

    return run


@pytest.fixture
def counting(monkeypatch):
    """Replaces a kernel's library by one that counts."""

    def replace(name: str) -> Counting:
        library = Counting(choice.library(name))
        monkeypatch.setitem(choice._found, name, library)
        return library

    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    return replace
