"""The transposed copy, to the bit."""

import pytest
import torch
from native_cases import needs_kernel

from twoaxis.ops.transpose import transposed

SHAPES = [(5, 3), (64, 64), (65, 130), (8, 8), (1, 9), (200, 77), (0, 4), (71, 8)]


@needs_kernel("transpose")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed(shape, counting):
    library = counting("transpose")
    x = torch.randn(shape).bfloat16()
    with torch.no_grad():
        found = transposed(x)
    assert found.is_contiguous()
    assert found.equal(x.t())
    assert library.calls == ["transpose"] * bool(x.numel())


@needs_kernel("transpose")
def test_what_the_kernel_does_not_have(counting):
    library = counting("transpose")
    with torch.no_grad():
        for x in (torch.randn(9, 4), torch.randn(9, 8).bfloat16()[:, ::2]):
            assert transposed(x).equal(x.t())
    assert transposed(torch.randn(9, 4).bfloat16().requires_grad_()).requires_grad
    assert library.calls == []
