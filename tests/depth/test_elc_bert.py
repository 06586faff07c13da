"""ELC-BERT: the equations of the four variants, and unit weights as the standard Transformer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import twoaxis
from twoaxis.depth import build, named_tensors
from twoaxis.types import Context, Layout, Shape

CTX = Context()


def sublayers(n_blocks, per_block, d=6):
    return torch.randn(n_blocks, per_block, d, d, dtype=torch.float64) * 0.5


@pytest.mark.parametrize("normalize", ["softmax", "none"])
@pytest.mark.parametrize("variant", ["zero", "base", "normalized", "weighted_output"])
def test_equals_the_equations(variant, normalize):
    torch.manual_seed(0)
    L, d = 4, 6
    stream, blocks = build(f"elc_bert(variant={variant!r}, normalize={normalize!r})", d, [["mlp", "mlp"]] * L)
    stream.double()
    W, h = sublayers(L, 2), [torch.randn(2, 3, d, dtype=torch.float64)]
    state = stream.open(h[0], CTX)

    def alpha(mix):
        if mix.logits is None:
            return torch.ones(1, dtype=torch.float64)
        mix.logits.data = torch.randn_like(mix.logits, dtype=torch.float64)
        return mix.logits.softmax(0) if normalize == "softmax" else mix.logits

    for n, connections in enumerate(blocks):
        x = sum(a * s for a, s in zip(alpha(connections[0].mix), h, strict=True))
        for connection, w in zip(connections, W[n], strict=True):
            connection.norm = nn.Identity()
            state = connection(state, lambda reads, ctx, w=w: (reads.x @ w).tanh(), CTX)
        A = (x @ W[n, 0]).tanh()
        branch = A + ((A if variant == "base" else x + A) @ W[n, 1]).tanh()
        h.append(F.layer_norm(branch, (d,), eps=1e-7) if variant == "normalized" else branch)
        torch.testing.assert_close(state["sources"].sources[-1], h[-1], rtol=0, atol=1e-12)
    expected = h[-1]
    if variant == "weighted_output":
        expected = sum(a * s for a, s in zip(alpha(stream.mix), h, strict=True))
    else:
        assert list(named_tensors(state)) == [f"sources.source.{L}"]  # the read-out needs no other
    torch.testing.assert_close(stream.readout(state), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_blocks", [1, 2, 5])
def test_unit_weights_and_a_summed_readout_are_the_standard_transformer(n_blocks):
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": n_blocks, "n_heads": 3}
    tokens = torch.randint(19, (2, 7))
    torch.manual_seed(0)
    spec = "elc_bert(variant='weighted_output', normalize='none')"
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, **sizes)).double()
    torch.manual_seed(0)
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**sizes)).double()
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("spec", "start"),
    [
        ("elc_bert", [0, 0, 0]),
        ("elc_bert(variant='base')", [0, 0, 1]),
        ("elc_bert(normalize='none')", [1, 1, 1]),
        ("elc_bert(variant='base', normalize='none')", [0, 0, 1]),
    ],
)
def test_logits_start_as_published(spec, start):
    _, blocks = build(spec, 4, [["mlp"]] * 3)
    assert blocks[2][0].mix.logits.tolist() == start
    if spec == "elc_bert(variant='base')":  # not one-hot: e / (e + n - 1) on the newest
        e = torch.e
        newest = blocks[2][0].mix.logits.softmax(0)[-1]
        assert newest.item() == pytest.approx(e / (e + 2))


@pytest.mark.parametrize(
    ("spec", "weights"),
    [("elc_bert", 77), ("elc_bert(variant='weighted_output')", 90), ("elc_bert(normalize='none')", 78)],
)
def test_counts_of_the_paper(spec, weights):
    # 78 at 12 blocks, 13 more for a weighted read-out; a softmax over the first block's one source has none
    layout = Layout(d_model=8, blocks=(("attention", "mlp"),) * 12)
    cost = twoaxis.parse_spec("depth", spec).cost(Shape(layout=layout, batch_size=1, seq_len=3))
    assert cost.parameters - 25 * 8 == weights
    assert cost.flops_forward == 2 * weights * 8 * 3


def test_refuses_an_unknown_variant():
    with pytest.raises(twoaxis.InputError, match="allowed is 'zero' or 'base'"):
        twoaxis.parse_spec("depth", "elc_bert(variant='one')")
