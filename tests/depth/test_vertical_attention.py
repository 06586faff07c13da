"""Vertical Attention as its reviews describe it: a softmax over normed block outputs."""

import pytest
import torch
from torch import nn

import twoaxis
from twoaxis.depth import build
from twoaxis.ops.reference import rms
from twoaxis.types import Context

CTX = Context()


@pytest.mark.parametrize("source_norm", ["rms", "length", "none"])
@pytest.mark.parametrize("residual", [True, False], ids=["outputs", "branches"])
def test_equals_the_equations(source_norm, residual):
    torch.manual_seed(0)
    L, d, eps = 4, 6, 1e-3
    spec = f"vertical_attention(block_residual={residual}, source_norm={source_norm!r})"
    stream, blocks = build(spec, d, [["mlp", "mlp"]] * L, norm_eps=eps)
    stream.double()
    W, h = torch.randn(L, 2, d, d, dtype=torch.float64), [torch.randn(2, 3, d, dtype=torch.float64)]
    divide = {"rms": lambda v: rms(v, eps), "length": lambda v: rms(v, eps) / d**0.5, "none": lambda v: v}
    state = stream.open(h[0], CTX)
    for n, connections in enumerate(blocks):
        a = torch.zeros(n + 1, dtype=torch.float64)
        if n:
            a = torch.randn(n + 1, dtype=torch.float64)
            connections[0].mix.logits.data = a
        x = sum(w * divide[source_norm](v) for w, v in zip(a.softmax(0), h, strict=True))
        for connection, w in zip(connections, W[n], strict=True):
            connection.norm = nn.Identity()
            state = connection(state, lambda reads, ctx, w=w: (reads.x @ w).tanh(), CTX)
        A = (x @ W[n, 0]).tanh()
        branch = A + ((x + A) @ W[n, 1]).tanh()
        h.append(x + branch if residual else branch)
    torch.testing.assert_close(state["output"], h[-1], rtol=0, atol=1e-12)


def test_one_hot_weights_without_norm_are_the_standard_transformer():
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": 3, "n_heads": 3}
    tokens = torch.randint(19, (2, 7))
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth="vertical_attention(source_norm='none')", **sizes))
    torch.manual_seed(0)
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("logits"):
                parameter[-1] = 200.0  # softmax: 1 for the newest source, 0 for the others, in float32
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-6)


def test_the_query_key_form_has_a_name_of_its_own():
    with pytest.raises(twoaxis.InputError, match="has no option 'kind'"):
        twoaxis.parse_spec("depth", "vertical_attention(kind='qk')")
    assert twoaxis.parse_spec("depth", "depth_window").coordinates().weights == "QK"
