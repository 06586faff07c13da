"""Linear: the same function in either order of the product."""

import pytest
import torch
from torch import nn

from twoaxis.linear import Linear


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 5), (1, 16), (4, 16), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_is_a_linear_layer(shape, dtype, grad):
    layer = Linear(6, 9).to(dtype)
    x = torch.randn(*shape, 12, dtype=dtype)[..., ::2]  # strided
    with torch.set_grad_enabled(grad):
        found = layer(x)
    expected = nn.functional.linear(x, layer.weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected.detach() if not grad else expected)


def test_starts_as_torch_starts_it():
    torch.manual_seed(3)
    ours = Linear(6, 9)
    torch.manual_seed(3)
    assert ours.weight.equal(nn.Linear(6, 9, bias=False).weight)
    assert ours.bias is None
