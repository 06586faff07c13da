"""The checks of test_feeding.py on every depth method with every block and window: `pytest -m full`.

Methods with their defaults meet every window; their other option sets meet every block with a window in turn.
"""

from dataclasses import replace
from itertools import count

import pytest

import test_feeding
from configurations import whole
from test_feeding import SIZES, pytest_generate_tests, windows  # noqa: F401

turn = count()
POINTS = [
    (replace(case, window=w), SIZES)
    for case in whole()
    for w in (windows(case) if "(" not in case.depth else [windows(case)[next(turn) % len(windows(case))]])
]
CASES = [case for case, _ in POINTS]
pytestmark = pytest.mark.full
globals().update({name: check for name, check in vars(test_feeding).items() if name.startswith("test_")})
