"""RMSNorm without gain."""

import pytest
import torch
from agreement import agree, error
from read_cases import randn

from twoaxis.ops import reference, rms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rms(dtype):
    x = 1e-3 * randn(4, 33, dtype=dtype)
    tolerance = 1e-14 if dtype == torch.float64 else torch.finfo(dtype).eps
    agree(lambda x: rms(x, 1e-6), lambda x: reference.rms(x, 1e-6), [x], tolerance)
    y = x.double()
    exact = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert error(rms(x), exact) <= 2 * tolerance
