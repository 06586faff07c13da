"""One thread and one seed for every test: results do not depend on the machine or on the order of tests."""

import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Objects that exist before the test are left out of gc.get_objects(): other tests' leftovers do not count."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
