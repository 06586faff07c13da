"""docs/methods/sketches.md: what is wrong with the sketches in circulation, and what transposes to depth."""

import pytest
import torch
import torch.nn.functional as F

import twoaxis
from twoaxis import Context
from twoaxis.depth import build
from twoaxis.depth.history import History
from twoaxis.norm import RMSNorm
from twoaxis.ops import delta_rewrite, local_attention
from twoaxis.types import Layout, Reads

CLOSE = {"rtol": 0.0, "atol": 1e-12}


def test_two_terms_are_not_elc_bert():
    """The weights of h_0 and h_1 in later readers: one ratio in the sketch, another in every reader of ELC-BERT."""
    a = torch.rand(6, dtype=torch.float64)
    x, sketched = torch.eye(6, dtype=torch.float64)[0], []  # a row of weights over h_0 .. h_5
    for n in range(1, 6):
        x = a[n] * x + (1 - a[n]) * torch.eye(6, dtype=torch.float64)[n]
        sketched.append(x[0] / x[1])
    assert max(sketched) - min(sketched) < 1e-12

    torch.manual_seed(0)
    _, blocks = build("elc_bert", 4, [["mlp"]] * 6)
    weights = [(c.mix.logits.data + torch.randn(n)).softmax(0) for n, (c,) in enumerate(blocks[1:], start=2)]
    ratios = [w[0] / w[1] for w in weights]
    assert max(ratios) / min(ratios) > 1.5
    assert sum(len(w) for w in weights) == 2 + 3 + 4 + 5 + 6  # where the sketch has one number per reader


def test_decaying_weights_are_not_denseformer():
    sizes = {"vocab_size": 11, "d_model": 12, "n_blocks": 3, "n_heads": 2}
    torch.manual_seed(0)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth="denseformer", **sizes)).double()
    plain = twoaxis.Decoder(twoaxis.ModelConfig(**sizes)).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    tokens = torch.randint(11, (2, 5))
    torch.testing.assert_close(model(tokens), plain(tokens), **CLOSE)
    alphas = [block.connections[-1].alpha for block in model.blocks]
    for alpha in alphas:
        decay = 0.5 ** torch.arange(len(alpha), dtype=torch.float64).flip(0)
        alpha.data = decay / decay.sum()
    assert (model(tokens) - plain(tokens)).abs().max() > 1e-3  # the sketch is no standard Transformer
    model.loss(tokens, tokens.roll(1, 1)).backward()
    assert all(alpha.grad.any() for alpha in alphas)  # each pair of layers has a weight that learns by itself
    assert sum(alpha.numel() for alpha in alphas) == 3 * (3 + 3) // 2


def test_the_gated_increment_is_not_ddl():
    d = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    increment = 0.1 * d * d.sigmoid()
    torch.testing.assert_close(increment, 0.1 * F.silu(d), **CLOSE)
    assert -0.0279 < increment.min() < -0.0278
    X, h, value = torch.randn(6, 4), torch.randn(6), torch.randn(4)  # value channels, one direction
    rewritten = delta_rewrite(X[None], h[None], value[None], torch.tensor([1.0]), 0.0)[0] - X
    k = h / h.norm()
    torch.testing.assert_close(k @ (X + rewritten), value)  # beta = 1 lands on the target ..
    assert torch.linalg.matrix_rank(rewritten, rtol=1e-5) == 1
    added = 0.1 * F.silu(torch.randn(6, 4))
    assert torch.linalg.matrix_rank(added, rtol=1e-5) == 4  # .. the increment is of full rank, and has none


B, T, WIDTH, W = 2, 5, 4, 3


def projections() -> list[torch.Tensor]:
    return [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3)]


def test_unfold_as_written():
    """The window is the last axis; a transpose does not help; at B = T it runs and gives (B, T, T, d)."""
    W_q, W_k, _ = projections()
    x = torch.randn(B, T, WIDTH, dtype=torch.float64)
    windows = F.pad(x, (0, 0, W - 1, 0)).unfold(1, W, 1)
    assert windows.shape == (B, T, WIDTH, W)
    with pytest.raises(RuntimeError):
        F.linear(windows, W_k)
    keys = F.linear(windows.mT, W_k)  # (B, T, w, d)
    with pytest.raises(RuntimeError):
        F.linear(x, W_q) @ keys.mT
    x = torch.randn(T, T, WIDTH, dtype=torch.float64)
    keys = F.linear(F.pad(x, (0, 0, W - 1, 0)).unfold(1, W, 1).mT, W_k)
    assert ((F.linear(x, W_q) @ keys.mT).softmax(-1) @ keys).shape == (T, T, T, WIDTH)
    first = torch.einsum("btd,btwd->btw", F.linear(x, W_q), keys).softmax(-1)[:, 0]
    assert (first[:, : W - 1].sum(-1) > 0.01).any()  # the first token gives weight to padding


def test_unfold_corrected():
    W_q, W_k, W_v = projections()
    x = torch.randn(B, T, WIDTH, dtype=torch.float64)
    q, k, v = (F.linear(x, weight).unflatten(-1, (2, -1)) for weight in (W_q, W_k, W_v))  # (B, T, H, D)
    k_w, v_w = (F.pad(rows, (0, 0, 0, 0, W - 1, 0)).unfold(1, W, 1) for rows in (k, v))  # (B, T, H, D, w)
    a = torch.einsum("bthd,bthdw->bthw", q, k_w) / 2**0.5
    ago = W - 1 - torch.arange(W)
    a = a.masked_fill((torch.arange(T)[:, None] < ago)[None, :, None], -torch.inf)
    o = torch.einsum("bthw,bthdw->bthd", a.softmax(-1), v_w)
    expected = local_attention(*(rows.transpose(1, 2) for rows in (q, k, v)), W)
    torch.testing.assert_close(o, expected.transpose(1, 2), **CLOSE)


def test_gates_apart_grow_with_depth():
    """Equal states x: the sketch gives l sigmoid(g) x; the window, a convex mix, W_V x however many there are."""
    x, g = torch.randn(2, 3, 6), torch.randn(2, 3, 1)
    sketch = [sum([g.sigmoid() * x] * n) for n in (2, 4)]
    torch.testing.assert_close(sketch[1], 2 * sketch[0])
    torch.manual_seed(0)
    stream, blocks = build("dynamic_window(window_blocks=5)", 6, [["mlp"]] * 5)
    torch.nn.init.normal_(stream.window_read.value.weight)
    for n in (2, 4):
        state = {"sources": History((x,) * n, tuple(range(n))), "share": x[..., 0]}
        z = blocks[n - 1][0].read_depth(state, Context())
        torch.testing.assert_close(z, F.linear(x, stream.window_read.value.weight))


def test_reads_of_different_scales_need_a_norm():
    """Without a norm the gate's middle is no equal mix: it is nearly all the larger read."""
    small, large = torch.randn(2, 3, 8), 30 * torch.randn(2, 3, 8)
    norm = RMSNorm(8)

    def share(s, z):
        """How much of the mix at G = 1/2 points along z."""
        return F.cosine_similarity(0.5 * s + 0.5 * z, z, dim=-1)

    assert (share(small, large) > 0.99).all()
    s, z = norm(small), norm(large)
    torch.testing.assert_close(share(s, z), share(z, s))


def test_norms_and_a_shared_feed_forward_transpose():
    torch.manual_seed(0)
    stack = torch.randn(2, 3, 4, 6)  # (B, tokens, layers, d)
    for part in (RMSNorm(6), twoaxis.methods("sequence")["mlp"](*mlp_of(6))):
        along_layers = apply(part, stack.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(along_layers, apply(part, stack))
    own = [twoaxis.methods("sequence")["mlp"](*mlp_of(6)) for _ in range(4)]  # one for each layer
    rows = torch.stack([apply(f, layer) for f, layer in zip(own, stack.unbind(2), strict=True)], 2)
    turned = torch.stack([apply(f, layer) for f, layer in zip(own, stack.flip(2).unbind(2), strict=True)], 2)
    assert (turned.flip(2) - rows).abs().max() > 1e-3  # layers are not alike, tokens are


def test_a_norm_over_an_ordered_axis_sees_what_comes_later():
    x = torch.randn(1, 5, 3)
    changed = x.clone()
    changed[:, -1] += 1
    over_axis = [(t - t.mean(1, keepdim=True))[:, :-1] for t in (x, changed)]
    assert (over_axis[0] - over_axis[1]).abs().max() > 0.1
    assert torch.equal(*(RMSNorm(3)(t)[:, :-1] for t in (x, changed)))


def mlp_of(d: int) -> tuple:
    cfg = twoaxis.parse_spec("sequence", "mlp(hidden=5)")
    return cfg, Layout(d_model=d, blocks=(("mlp",),)), 0


def apply(part, stack):
    """A norm or a core on (.., d)."""
    if isinstance(part, RMSNorm):
        return part(stack)
    return part(Reads(stack.flatten(0, -3)), Context()).view_as(stack)
