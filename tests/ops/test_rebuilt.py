"""States that backward makes again: gradients to the bit, whatever the order in which they are asked for."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import twoaxis
from configurations import tokens
from twoaxis import Decoder, ModelConfig
from twoaxis.ops import delta_rewrite, rebuilt
from twoaxis.verify.saved import _nodes, _tensors, saved_bytes

METHODS = ["ddl(value_dim=4)", "ddl(value_dim=2, compressor='free')", "hyper_connections", "mhc"]


def model(depth, n_blocks=5, **options):
    torch.manual_seed(0)
    cfg = ModelConfig(vocab_size=17, d_model=12, n_blocks=n_blocks, n_heads=2, depth=depth, **options)
    made = Decoder(cfg)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.2 * torch.randn_like(p)
    return made


@pytest.fixture
def kept(monkeypatch):
    """Runs something without loops: every operator keeps its own state."""

    def run(f):
        with monkeypatch.context() as patch:
            patch.setattr(rebuilt, "current", lambda: None)
            return f()

    return run


def same(found, expected):
    return all(a.equal(b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"state_dtype": "bfloat16"}], ids=["fp32", "bf16 state"])
@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("depth", METHODS)
def test_gradients_are_those_of_kept_states_to_the_bit(depth, backend, options, kept, monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    m, x = model(depth, **options), tokens(2, 7)
    parameters = list(m.parameters())

    def grads(**more):
        return torch.autograd.grad(m.loss(x, x), parameters, **more)

    expected = kept(grads)
    assert same(grads(), expected)
    loss = m.loss(x, x)
    for _ in range(2):  # a second pass makes the states again
        assert same(torch.autograd.grad(loss, parameters, retain_graph=True), expected)


@pytest.mark.parametrize("depth", METHODS)
def test_parts_of_the_stack_in_any_order(depth, kept):
    """Losses on states at several depths, backward one after another, the shallow ones first and last."""
    m, x = model(depth), tokens(2, 7)
    parameters = list(m.parameters())

    def grads():
        _, states = m(x, return_states=True)
        losses = [
            states[name].square().sum() for name in ("block.2", "block.5", "block.1", "block.4", "block.2")
        ]
        return [torch.autograd.grad(s, parameters, retain_graph=True, allow_unused=True) for s in losses]

    for found, expected in zip(grads(), kept(grads), strict=True):
        assert same([g for g in found if g is not None], [g for g in expected if g is not None])


def test_hooks_and_extra_losses_on_states_work(kept):
    m, x = model("ddl(value_dim=4)"), tokens(2, 7)

    def grads():
        logits, states = m(x, return_states=True)
        states["block.2"].register_hook(lambda g: 2 * g)
        loss = logits.square().mean() + states["block.3"].square().mean()
        return torch.autograd.grad(loss, list(m.parameters()))

    assert same(grads(), kept(grads))


@pytest.mark.parametrize(
    ("depth", "most"), [("ddl(value_dim=4)", 1.25), ("hyper_connections", 1.6), ("attnres", 1.1)]
)
def test_saved_bytes_over_additive(depth, most):
    """The aims at 48 blocks, by the cost model, which `tests/cost/test_measured.py` holds to what hooks see."""

    def saved(method):
        cfg = ModelConfig(vocab_size=17, d_model=128, n_blocks=48, n_heads=4, depth=method)
        return twoaxis.cost(cfg, 4, 128).saved_bytes

    assert saved(depth) <= most * saved("additive")


@pytest.mark.parametrize("depth", METHODS)
def test_saved_bytes_are_what_the_cost_model_says(depth):
    m, x = model(depth, n_blocks=6), tokens(2, 7)
    assert saved_bytes(m, x, x.clone()) == twoaxis.cost(m.cfg, 2, 7).saved_bytes


def test_no_chain_where_blocks_are_recomputed_or_nothing_is_recorded(monkeypatch):
    m, x = model("ddl(value_dim=4)"), tokens(2, 7)
    monkeypatch.setattr(rebuilt.Loop, "place_of", None)  # calling it would fail
    m.checkpointing = True
    m.loss(x, x).backward()
    m.checkpointing = False
    with torch.no_grad():
        m.loss(x, x)
    delta_rewrite(*(torch.randn(s, requires_grad=True) for s in ((3, 4, 2), (3, 4), (3, 2), (3, 1))), 1e-5)


def test_two_writes_of_one_state_begin_a_new_chain():
    def run():
        X, h, v, gate = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
        one, other = delta_rewrite(X, h, v, gate, 1e-5), delta_rewrite(X, 2 * h, v, gate, 1e-5)
        last = delta_rewrite(one, h, v, gate, 1e-5) + delta_rewrite(
            other, v @ X.mT[0, :, :4] + h, v, gate, 1e-5
        )
        return torch.autograd.grad(last.square().sum(), (X, h, v, gate))

    shapes = ((3, 4, 2), (3, 4), (3, 2), (3, 1))
    torch.manual_seed(0)
    expected = run()
    torch.manual_seed(0)
    with rebuilt.loop(True):
        found = run()
    assert same(found, expected)


def test_what_was_changed_in_place_is_refused():
    m, x = model("ddl(value_dim=4)", n_blocks=6), tokens(2, 7)
    logits, states = m(x, return_states=True)
    with torch.no_grad():
        states["block.4"].add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        logits.sum().backward()


@pytest.mark.parametrize(
    "in_place", [lambda x: x.mul_(2), lambda x: x.detach()[:, 0].add_(1)], ids=["all", "a part"]
)
def test_a_hook_that_changes_a_state_in_place(in_place, kept):
    """A rebuilt state would be the one before the change."""
    m, x = model("ddl(value_dim=4)"), tokens(2, 7)
    for block in m.blocks[1:3]:
        block.register_forward_hook(lambda _, args, state: (in_place(state), state)[1])

    def grads():
        return torch.autograd.grad(m.loss(x, x), list(m.parameters()))

    assert same(grads(), kept(grads))


@pytest.mark.parametrize("depth", [*METHODS, "attnres", "delta_attnres"])
def test_blocks_that_are_recomputed_by_themselves(depth, kept):
    m, x = model(depth), tokens(2, 7)

    def grads():
        return torch.autograd.grad(m.loss(x, x), list(m.parameters()))

    expected = kept(grads)
    for block in m.blocks[1:3]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for found, exact in zip(grads(), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def held(loss):
    """The tensors that operators hold on the nodes of a graph, out of autograd's sight."""
    parts = (part for node in _nodes(loss) if hasattr(node, "__dict__") for part in vars(node).values())
    return [x for part in parts for x in _tensors(part)]


@pytest.mark.parametrize("depth", METHODS)
def test_nothing_is_held_after_backward(depth):
    """A loss that is still referred to while the next step runs."""
    m, x = model(depth), tokens(2, 7)
    loss = m.loss(x, x)
    assert held(loss)
    loss.backward(retain_graph=True)
    assert held(loss)
    loss.backward()
    assert not held(loss)


@pytest.mark.parametrize("depth", METHODS)
def test_frozen_layers_below_hold_nothing(depth):
    """What autograd does not record is no chain either."""
    x, counts = tokens(2, 7), []
    for n_blocks in (3, 6):
        m = model(depth, n_blocks).requires_grad_(False)
        m.blocks[-2:].requires_grad_(True)
        counts.append(saved_bytes(m, x, x.clone()))
    assert counts[0] == counts[1]
