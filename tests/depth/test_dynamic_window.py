"""The dynamic depth window: its soft edge, its limits, what it drops, what it reports and what it adds to a loss."""

import math

import pytest
import torch

import twoaxis
from twoaxis.depth import History, build
from twoaxis.types import Context

SIZES = {"vocab_size": 19, "d_model": 12, "n_heads": 3}


def decoder(spec, n_blocks=5, std=0.3):
    """A float64 decoder at a random point."""
    torch.manual_seed(n_blocks)
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, n_blocks=n_blocks, **SIZES)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn_like(parameter))
    return model


def set_choices(model, bias, weight=0.0):
    """The same K_t, or gates, for every token."""
    with torch.no_grad():
        for block in model.blocks:
            if (chooser := block.connections[0].chooser) is not None:
                chooser.weight.fill_(weight)
                chooser.bias.fill_(bias)


def rows(model, length=7):
    return torch.randint(19, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ramp", [1, 3])
@pytest.mark.parametrize(
    "options", ["", "heads=3, output=True", "heads=2, position='rope'", "position='bias'"]
)
def test_equation(ramp, options):
    """m_z = clip((R + K_t - 1 - z) / R, 0, 1), a = m exp(s) / sum m exp(s), token by token and head by head."""
    K_max, d, n = 3, 12, 6
    given = f"dynamic_window(window_blocks={K_max}, ramp_blocks={ramp}, shared=False, {options})"
    _, blocks = build(given.replace(", )", ")"), d, [["mlp"]] * n)
    connection = blocks[-1][0].double()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in connection.parameters():
            p.copy_(torch.randn_like(p))
    read, chooser = connection.window_read, connection.chooser
    kept = min(K_max + ramp - 1, n)
    states = [torch.randn(2, 4, d, dtype=torch.float64) for _ in range(kept)]
    history = History(tuple(states), tuple(range(n - kept, n)))
    h, H = states[-1], connection.cfg.heads
    assert n > K_max
    u = (h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()) @ chooser.weight[0] + chooser.bias
    K = 1 + (K_max - 1) * u.sigmoid()
    age = torch.arange(kept - 1, -1, -1)
    m = ((ramp + K[..., None] - 1 - age) / ramp).clamp(0, 1)  # (B, T, n)
    plain = read.weights(h, tuple(map(read.key, states)))  # (B, T, H, n), softmax(s)
    a = m[..., None, :] * plain
    a = a / a.sum(-1, keepdim=True)
    v = torch.stack([read.value(x) for x in states], -2).unflatten(-1, (H, -1))  # (B, T, n, H, D)
    z = read.output(torch.einsum("bthn,btnhd->bthd", a, v).flatten(-2))
    torch.testing.assert_close(connection.read_depth({"sources": history}), z, rtol=0, atol=1e-12)
    assert ((m > 0) & (m < 1)).any()
    assert (m == 0).any()


@pytest.mark.parametrize("form", ["soft", "gates"])
@pytest.mark.parametrize(
    "options", ["", "shared=False, heads=3", "heads=2, position='rope', injection='replace'"]
)
@pytest.mark.parametrize("K", [2, 3, 9])
def test_open_windows_are_the_fixed_window(form, options, K):
    dynamic = decoder(f"dynamic_window(window_blocks={K}, form={form!r}, {options})".replace(", )", ")"))
    set_choices(dynamic, 1e4)
    fixed = decoder(f"depth_window(window_blocks={K}, {options})".replace(", )", ")"))
    shared = {n: w for n, w in dynamic.state_dict().items() if "chooser" not in n}
    fixed.load_state_dict(shared)
    assert torch.equal(dynamic(rows(dynamic)), fixed(rows(fixed)))


@pytest.mark.parametrize("form", ["soft", "gates"])
def test_shut_windows_see_the_current_state_alone(form):
    dynamic = decoder(f"dynamic_window(form={form!r})")
    set_choices(dynamic, -1e4)
    alone = decoder("depth_window(window_blocks=1)")
    alone.load_state_dict({n: w for n, w in dynamic.state_dict().items() if n in alone.state_dict()})
    torch.testing.assert_close(dynamic(rows(dynamic)), alone(rows(alone)), rtol=0, atol=1e-12)


def test_gates_multiply_on_the_way_back():
    model = decoder("dynamic_window(form='gates', window_blocks=3)", 3)
    _, states = model(rows(model), return_states=True)
    connection, state = model.blocks[2].connections[0], states["block.2"]
    h, chooser = state["sources"].sources[-1], connection.chooser
    g = (twoaxis.ops.rms(h) @ chooser.weight.T + chooser.bias).sigmoid()
    expected = 1 + g[..., 0] + g[..., 0] * g[..., 1]
    torch.testing.assert_close(connection.expected_depth(state, Context()), expected)
    _, masks = chooser(h, 3)
    torch.testing.assert_close(masks[2].exp(), g[..., 0] * g[..., 1])


def test_states_that_no_token_reads_are_dropped(monkeypatch):
    """K_t <= 2 for every token: the read gets two states of eight, and gives what it would with all."""
    model = decoder("dynamic_window(window_blocks=8)", 8)
    set_choices(model, math.log(1 / 7))  # sigmoid 1/8: K_t = 1 + l / 8 <= 2
    read, seen = model.stream.window_read, []
    forward = read.forward
    monkeypatch.setattr(
        read,
        "forward",
        lambda states, logits=None, cache=None: seen.append(len(states)) or forward(states, logits),
    )
    few = model(rows(model))
    assert seen == [1] + [2] * 7
    seen.clear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # then nothing is read off the device
    torch.testing.assert_close(model(rows(model)), few, rtol=0, atol=1e-13)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_dropped_state_changes_no_gradient(monkeypatch):
    found = []
    for all_states in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda on=all_states: on)
        model = decoder("dynamic_window(window_blocks=5, ramp_blocks=2)")
        set_choices(model, -1.5, weight=0.3)
        model.loss(rows(model), rows(model)).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
        assert all(g.isfinite().all() for g in found[-1].values())
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


def test_a_row_that_is_not_finite_leaves_the_others_alone():
    """With NaN in one row no window is known to be the widest, so all states stay in."""
    model, tokens = decoder("dynamic_window(window_blocks=3)"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    alone = model(tokens[:1])
    with torch.no_grad():
        model.embedding.weight[5] = math.nan
    logits = model(tokens)[..., :5]  # tied: NaN is a logit too
    torch.testing.assert_close(logits[:1], alone[..., :5], rtol=1e-12, atol=1e-12)
    assert logits[1, 1:].isnan().all()


@pytest.mark.parametrize(("options", "most"), [("window_blocks=3", 3), ("window_blocks=3, ramp_blocks=4", 6)])
def test_keeps_at_most_the_window_and_its_ramp(options, most):
    stream, _ = build(f"dynamic_window({options})", 4, [["mlp"]] * 9)
    held = [sum("source" in name for name in stream.state_spec(n, 1, 1)) for n in range(10)]
    assert held == [min(n + 1, most) for n in range(9)] + [1]


def test_expected_depth_knows_no_dropout():
    cfg = twoaxis.ModelConfig(depth="dynamic_window", n_blocks=3, dropout=0.5, **SIZES)
    model = twoaxis.Decoder(cfg)
    with torch.no_grad():
        model.blocks[2].connections[0].chooser.weight.fill_(1.0)
    first, second = (twoaxis.expected_depth(model, rows(model)) for _ in range(2))
    assert first == second
    assert model.training


def test_expected_depth_is_reported():
    model = decoder("dynamic_window(window_blocks=4)")
    set_choices(model, 0.0)  # every token in the middle of what there is, or of the window
    assert twoaxis.expected_depth(model, rows(model)) == [None, 1.5, 2.0, 2.5, 2.5]
    x = rows(model)
    model = decoder("dynamic_window(window_blocks=4)")
    segments = torch.tensor([[0] * 5 + [-1] * 2, [0] * 7])
    means = twoaxis.expected_depth(model, x, segments=segments)
    _, states = model(x, segments=segments, return_states=True)
    K = model.blocks[3].connections[0].expected_depth(states["block.3"], Context())
    assert means[3] == pytest.approx(torch.cat((K[0, :5], K[1])).mean().item())
    assert twoaxis.expected_depth(decoder("depth_window"), x) == [None] * 5


@pytest.mark.parametrize("form", ["soft", "gates"])
def test_the_loss_term_is_the_mean_share_of_the_window(form):
    model, n = decoder(f"dynamic_window(window_blocks=4, form={form!r})"), 5
    _, states = model(rows(model), return_states=True)
    shares = []
    for block in range(1, n):
        h = states[f"block.{block}"]["sources"].sources[-1]
        K, _ = model.blocks[block].connections[0].chooser(h, min(block + 1, 4))
        shares.append(K / 4)
    term = model.stream.loss_term(states[f"block.{n}"])
    torch.testing.assert_close(term, torch.stack(shares).mean(0))
    term.sum().backward()
    grads = [b.connections[0].chooser.bias.grad for b in model.blocks[1:]]
    assert all((g > 0).all() for g in grads)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("window_blocks=1", "allowed is a window_blocks of 2 or more"),
        ("ramp_blocks=0", "ramp_blocks of 1"),
        ("form='gates', ramp_blocks=2", "gates have no ramp"),
        ("window_blocks=None", "allowed is"),
    ],
)
def test_refuses(bad, said):
    with pytest.raises(twoaxis.InputError, match=said):
        twoaxis.parse_spec("depth", f"dynamic_window({bad})")
