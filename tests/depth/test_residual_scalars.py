"""Residual and embedding scalars: x' = a x + b x_0 + f(norm(a x + b x_0))."""

import pytest
import torch
from torch import nn

import twoaxis
from twoaxis.depth import build
from twoaxis.types import Context


@pytest.mark.parametrize("scaled", ["block", "sublayer"])
def test_equals_the_equation(scaled):
    torch.manual_seed(0)
    L, d, ctx = 3, 6, Context()
    stream, blocks = build(f"residual_scalars(scaled={scaled!r})", d, [["mlp", "mlp"]] * L)
    stream.double()
    W, x0 = torch.randn(L, 2, d, d, dtype=torch.float64), torch.randn(2, 3, d, dtype=torch.float64)
    state, x = stream.open(x0, ctx), x0
    for n, connections in enumerate(blocks):
        for i, (connection, w) in enumerate(zip(connections, W[n], strict=True)):
            connection.norm = nn.Identity()
            if (n or i) and (i == 0 or scaled == "sublayer"):
                connection.weights.data = torch.randn(2, dtype=torch.float64)
                a, b = connection.weights
                x = a * x + b * x0
            else:
                assert connection.weights is None
            state = connection(state, lambda reads, ctx, w=w: (reads.x @ w).tanh(), ctx)
            x = x + (x @ w).tanh()
            torch.testing.assert_close(state["stream"], x, rtol=0, atol=1e-12)
    assert list(state) == ["stream"]  # nobody reads the embeddings any more


@pytest.mark.parametrize("n_blocks", [1, 2, 4])
@pytest.mark.parametrize("scaled", ["block", "sublayer"])
def test_starts_exactly_as_the_standard_transformer(scaled, n_blocks):
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": n_blocks, "n_heads": 3}
    tokens = torch.randint(19, (2, 7))
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=f"residual_scalars(scaled={scaled!r})", **sizes))
    torch.manual_seed(0)
    assert torch.equal(model(tokens), twoaxis.Decoder(twoaxis.ModelConfig(**sizes))(tokens))
    scalars = [n for n in dict(model.named_parameters()) if n.endswith(".weights")]
    assert len(scalars) == (n_blocks - 1 if scaled == "block" else 2 * n_blocks - 1)
    assert not any(model.param_rules()[n].decay for n in scalars)


def test_embeddings_may_be_mixed_in_from_the_start():
    _, blocks = build("residual_scalars(embedding_start=0.25)", 4, [["mlp"]] * 2)
    assert blocks[1][0].weights.tolist() == [1.0, 0.25]
    assert twoaxis.parse_spec("depth", "residual_scalars(embedding_start=0.25)").standard_start() == "no"
