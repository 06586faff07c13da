"""One thread and one seed for every test: results do not depend on the machine or on the order of tests."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
