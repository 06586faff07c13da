"""Deep Delta Learning: compressors, options, parameters and costs."""

import pytest
import torch
import torch.nn.functional as F
from points import CTX, connection, model, perturb, state_of
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import twoaxis
from twoaxis import InputError, Shape
from twoaxis.depth import DDL, build, named_tensors

PAPER = "target_source='context', target_act='linear', target_bias=False"
SPECS = [
    "ddl",
    "ddl(value_dim=4)",
    "ddl(value_dim=2, embed_conv=False)",
    "ddl(value_dim=3, kernel=2, compressor='token')",
    "ddl(value_dim=3, compressor='free')",
    "ddl(gate='mlp', gate_hidden=3, target_scale=2.5)",
    f"ddl(value_dim=3, {PAPER})",
    "ddl(target_const=1.7, write_only=True)",
    "ddl(value_dim=2, key_eps=0.7, beta0=0.5, write_only=True)",
]


@pytest.mark.parametrize(("channels", "kernel"), [(2, 1), (2, 2), (2, 3), (3, 3), (4, 2), (4, 4), (4, 7)])
def test_channel_compressor_is_a_zero_padded_correlation(channels: int, kernel: int) -> None:
    """One tap more on the right than on the left for even kernels, and every tap in use."""
    c = connection(f"ddl(value_dim={channels}, kernel={kernel})")
    X = state_of(c, 2, 3)
    w, left = c.compress.weight, (kernel - 1) // 2
    padded = F.pad(X.flatten(0, 1), (left, kernel - 1 - left))  # (BT, d, m + k - 1)
    mixed = F.conv1d(padded, w.unsqueeze(1), groups=6)
    expected = (mixed @ c.compress.read).unflatten(0, (2, 3))
    torch.testing.assert_close(c.compress(X, CTX, None), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.grad(expected.square().sum(), w)[0].ne(0).all()


def test_free_compressor_is_the_papers_sum() -> None:
    """d m free numbers, no kernel and no read vector; every channel compressor is one of them."""
    c, other = connection("ddl(value_dim=3, compressor='free')"), connection("ddl(value_dim=3, kernel=2)")
    X = state_of(c, 2, 3)
    assert [(n, tuple(p.shape)) for n, p in c.compress.named_parameters()] == [("weight", (6, 3))]
    torch.testing.assert_close(c.compress(X, CTX, None), torch.einsum("btiv,iv->bti", X, c.compress.weight))
    c.compress.weight.data = other.compress.effective().data
    torch.testing.assert_close(c.compress(X, CTX, None), other.compress(X, CTX, None))


def test_token_compressor_is_causal_and_reads_k_tokens() -> None:
    """Pitfall: change token j alone -> exactly tokens j .. j+k-1 move."""
    c = connection("ddl(value_dim=3, compressor='token')")
    X = state_of(c, 1, 9)
    other = X.clone()
    other[:, 2] += 1
    moved = (c.read(X, CTX)[0].x != c.read(other, CTX)[0].x).any(-1)[0]
    assert moved.tolist() == [2 <= t < 6 for t in range(9)]


def test_embedding_convolution_starts_as_copies() -> None:
    stream, _ = build("ddl(value_dim=3)", 6, [["mlp"]])
    plain, _ = build("ddl(value_dim=3, embed_conv=False)", 6, [["mlp"]])
    x = torch.randn(2, 5, 6)
    assert torch.equal(stream.open(x, CTX), plain.open(x, CTX))
    assert torch.equal(plain.open(x, CTX), torch.stack((x,) * 3, -1))


def test_one_compressor_per_block() -> None:
    m = perturb(model("ddl(value_dim=3)", sequence=["short_swa(window=3)", "attention", "mlp"]).double())
    owners = [name for name in dict(m.named_modules()) if name.endswith("compress")]
    assert owners == ["stream.compress", "blocks.0.connections.0.compress", "blocks.1.connections.0.compress"]
    assert sum("compress.weight" in name for name in m.state_dict()) == 3
    block, tokens = m.blocks[0], torch.randint(17, (2, 5))
    seen: list[Tensor] = []
    block.connections[0].compress.register_forward_hook(lambda module, given, out: seen.append(out))
    m(tokens)
    assert len(seen) == 3  # every sublayer of the block reads through it


@pytest.mark.parametrize("beta0", [0.0, 0.4, 1.0, 2.0])
def test_gate_starts_at_beta0(beta0: float) -> None:
    _, ((c,),) = build(f"ddl(beta0={beta0})", 8, [["mlp"]])
    nn.init.zeros_(c.gate.weight)
    _, (_, beta) = c.read(torch.randn(2, 3, 8), CTX)
    torch.testing.assert_close(beta, torch.full_like(beta, beta0), rtol=0, atol=3e-6)


def test_option_values_give_different_models() -> None:
    """Pitfall: two values of each option, same weights -> outputs differ, or it is refused."""
    options = ["", "kernel=2", "compressor='token'", "embed_conv=False", "embed_kernel=2", "gate='mlp'"]
    options += ["compressor='free'"]
    options += ["target_source='context'", "target_act='linear'", "target_bias=False", "target_scale=2"]
    options += ["target_const=1", "beta0=0.5", "key_eps=0.5", "write_only=True", "gate='mlp', gate_hidden=5"]
    tokens, outputs = torch.randint(17, (1, 6)), []
    for option in options:
        built = perturb(model(f"ddl(value_dim=4, {option})", n_blocks=1).double(), 0.1)
        outputs.append(built(tokens))
    for i, a in enumerate(outputs):
        assert all(not torch.allclose(a, b) for b in outputs[:i]), options[i]


@pytest.mark.parametrize("spec", SPECS)
def test_cost_equals_what_is_built(spec: str) -> None:
    m = model(spec, n_blocks=3, sequence=["attention", "short_swa(window=2)", "mlp"])
    cost = m.cfg.depth_config().cost(Shape(layout=m.cfg.layout(), batch_size=2, seq_len=7))
    owned = [m.stream, *(b.connections for b in m.blocks)]
    assert cost.parameters == sum(p.numel() for part in owned for p in part.parameters())
    state = m(torch.randint(17, (2, 7)), return_states=True)[1]["block.3"]
    assert cost.boundary_bytes == {"full": state.numel() * state.element_size()}
    found = {name: twoaxis.TensorSpec(tuple(t.shape)) for name, t in named_tensors(state).items()}
    assert found == m.stream.state_spec(3, 2, 7)
    slots = m.new_cache(2, 7).slots
    own = {name: slot for name, slot in slots.items() if ".cores." not in name}
    assert cost.decode_state_bytes == sum(slot.nbytes for slot in own.values())
    if "token" in spec:
        assert len(own) == 9 + 1 + 1  # each sublayer, the read-out, the embedding convolution


@pytest.mark.parametrize(
    ("size", "spec", "extra"),
    [
        ("small", "", 36_912),
        ("small", "value_dim=4, embed_conv=False", 132_268),
        ("small", "value_dim=4", 144_556),
        ("small", "value_dim=4, compressor='token', embed_conv=False", 252_076),
        ("small", "value_dim=4, compressor='token'", 264_364),
        ("medium", "", 98_400),
        ("medium", "value_dim=4", 364_884),
        ("medium", "value_dim=4, compressor='token'", 672_084),
    ],
)
def test_parameters_at_the_papers_sizes(size: str, spec: str, extra: int) -> None:
    """Counted with the official files: 12 blocks of width 768, 24 of 1024."""
    blocks, width = {"small": (12, 768), "medium": (24, 1024)}[size]
    layout = twoaxis.Layout(d_model=width, blocks=(("attention", "mlp"),) * blocks)
    shape = Shape(layout=layout, batch_size=1, seq_len=1)
    plain = twoaxis.parse_spec("depth", "additive").cost(shape).parameters
    assert twoaxis.parse_spec("depth", f"ddl({spec})").cost(shape).parameters - plain == extra


def test_flops_of_the_learned_maps_equal_the_counter() -> None:
    """Gate and target are matrix products, which the counter sees; the scalar rewrite adds 4 d per token."""
    for spec in ("ddl", "ddl(gate='mlp', gate_hidden=5)", "ddl(target_const=1)"):
        _, (cs,) = build(spec, 8, [["attention", "mlp"]])
        x = torch.randn(2, 3, 8, requires_grad=True)
        cost = cs[0].cfg.cost(Shape(layout=cs[0].layout, batch_size=2, seq_len=3))
        with FlopCounterMode(display=False) as counter:
            cs[1](cs[0](x, lambda reads, ctx: reads.x, CTX), lambda reads, ctx: reads.x, CTX)
        assert cost.flops_forward == counter.get_total_flops() + 2 * 6 * 4 * 8
        assert cost.flops_backward == 2 * cost.flops_forward


def test_nothing_of_it_decays() -> None:
    rules = model("ddl(value_dim=3, gate='mlp', compressor='token')").param_rules()
    assert not any(r.decay for name, r in rules.items() if ".connections." in name or "stream." in name)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("value_dim=0", "value_dim"),
        ("value_dim=True", "value_dim"),
        ("kernel=3", "value_dim=1"),
        ("compressor='token'", "value_dim=1"),
        ("embed_conv=True", "value_dim=1"),
        ("value_dim=4, embed_conv=False, embed_kernel=3", "embed_conv=False"),
        ("value_dim=3, kernel=6", "5 taps"),
        ("value_dim=3, kernel=0", "kernel"),
        ("value_dim=3, compressor='both'", "'channel' or 'token' or 'free'"),
        ("value_dim=3, compressor='free', kernel=2", "compressor='free'"),
        ("target_const=2, target_act='linear'", "target_const"),
        ("target_act='linear', target_scale=2", "linear"),
        ("gate_hidden=64", "gate='linear'"),
        ("beta0=2.5", "0 to 2"),
        ("key_eps=0", "above 0"),
        ("target_scale=-1", "above 0"),
        ("valuedim=4", "value_dim"),
    ],
)
def test_refuses_bad_and_idle_options(options: str, word: str) -> None:
    with pytest.raises(InputError, match=word) as error:
        twoaxis.parse_spec("depth", f"ddl({options})")
    assert "\n" not in str(error.value)


def test_never_starts_as_the_standard_transformer() -> None:
    assert DDL.Config().standard_start() == "no"
    assert DDL.Config().coordinates().injection == "rewrite"
