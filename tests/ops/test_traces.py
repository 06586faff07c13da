"""Operators under torch's tracers: whole graphs, and shapes without data."""

import pytest
import torch
from attention_cases import documents, qkv

from twoaxis.ops import delta_rewrite, depth_read, head_mix, local_attention, mix, token_mix

CALLS = {
    "blocked": lambda x: local_attention(x, 2 * x, 3 * x, 4, backend="blocked"),
    "blocked documents": lambda x: local_attention(
        x, 2 * x, 3 * x, 4, segments=documents(2, 40), backend="blocked"
    ),
    "sdpa": lambda x: local_attention(x, x, x, None),
    "depth_read": lambda x: depth_read(x[0, 0, 0], (x, 2 * x), output_eps=1e-6),
    "mix": lambda x: mix((x, 2 * x), x[0, 0, :2, 0]),
    "token_mix": lambda x: token_mix((x, 2 * x), x[..., :2].unsqueeze(-2))[0],
    "head_mix": lambda x: head_mix((x, 2 * x), x[0, 0, :3, :2].repeat(1, 3), (40,))[0].mT,
    "delta_rewrite": lambda x: delta_rewrite(x, 2 * x, x[..., 0], x[..., 1], 1e-5),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does
def test_one_graph(call):
    """Pitfall: fullgraph works; forward and backward equal the eager ones."""
    torch._dynamo.reset()
    grads = []
    for f in (call, torch.compile(call, backend="eager", fullgraph=True)):
        x = qkv(40)[0].requires_grad_()
        torch.manual_seed(0)
        x.data.normal_()
        f(x).square().sum().backward()
        grads.append(x.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-13


@pytest.mark.parametrize("name", [name for name in CALLS if name != "blocked documents"])  # ids are data
def test_shapes_without_data(name):
    x = torch.empty(2, 4, 40, 3, device="meta", requires_grad=True)
    out = CALLS[name](x)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape
