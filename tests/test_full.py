"""The checks of test_registry.py on every depth method with every block: `pytest -m full`."""

import pytest

import test_registry
from configurations import whole
from test_registry import pytest_generate_tests  # noqa: F401

CASES = whole()
pytestmark = pytest.mark.full
globals().update({name: check for name, check in vars(test_registry).items() if name.startswith("test_")})
