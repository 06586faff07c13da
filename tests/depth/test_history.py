"""Histories and the states made of them: immutable, named, and as small as their spec says."""

import contextlib

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint

import twoaxis
from twoaxis.depth import History, build, named_tensors
from twoaxis.types import Context, Shape

SPECS = [
    "denseformer",
    "denseformer(dilation=2, period=3)",
    "attnres",
    "attnres(block_sublayers=3)",
    "depth_window",
    "depth_window(window_blocks=2, shared=False)",
]
BLOCKS = [["attention", "mlp"], ["mlp"], ["attention", "mlp", "mlp"], ["mlp"], ["attention", "mlp"]]
CTX = Context()


def core(reads, ctx):
    return reads.x.tanh()


def randomised(*modules):
    """The modules in float64 at a random point."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in modules:
            for parameter in module.double().parameters():
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return modules


def network(spec, d=6):
    stream, blocks = build(spec, d, BLOCKS)
    randomised(stream, *(c for connections in blocks for c in connections))
    return stream, blocks


def run(connections, state):
    for connection in connections:
        state = connection(state, core, CTX)
    return state


def test_push_and_choice_leave_the_history_as_it_was():
    a, b, c = (torch.full((1, 1, 2), float(i)) for i in range(3))
    history = History().push(a, 0).push(b, 2)
    longer = history.push(c, 5)
    assert (history.index, longer.index) == ((0, 2), (0, 2, 5))
    assert longer.keep(lambda i: i != 2).sources == (a, c)
    assert longer.last(2).index == (2, 5)
    assert (len(longer.last(9)), len(longer.last(0)), len(history)) == (3, 0, 2)


def test_is_a_pytree_with_names():
    history = History((torch.ones(1), torch.zeros(1)), (1, 4))
    state = {"stream": torch.ones(2), "sources": history}
    assert list(named_tensors(state)) == ["stream", "sources.source.1", "sources.source.4"]
    doubled = pytree.tree_map(lambda t: 2 * t, state)
    assert doubled["sources"].index == (1, 4)
    assert doubled["sources"].sources[0].item() == 2
    assert list(named_tensors(torch.ones(3))) == ["stream"]


# pitfalls, parallel training: "shapes, dtypes and counts per boundary are listed by the planner and match"
@pytest.mark.parametrize("spec", SPECS)
def test_state_is_what_its_spec_says_at_every_boundary(spec):
    stream, blocks = build(spec, 6, BLOCKS)
    state, sent = stream.open(torch.randn(2, 3, 6), CTX), []
    for depth in range(len(BLOCKS) + 1):
        held = {name: (tuple(t.shape), str(t.dtype)[6:]) for name, t in named_tensors(state).items()}
        told = stream.state_spec(depth, 2, 3)
        assert held == {name: (t.shape, t.dtype) for name, t in told.items()}
        sent.append(sum(t.numel() * t.element_size() for t in named_tensors(state).values()))
        if depth < len(BLOCKS):
            state = run(blocks[depth], state)
    cost = stream.cfg.cost(Shape(layout=stream.layout, batch_size=2, seq_len=3))
    assert cost.boundary_bytes["full"] == max(sent)


# pitfalls, depth states: the names and meaning of each exported state are fixed
@pytest.mark.parametrize("spec", SPECS)
def test_a_source_keeps_its_name_and_value_for_as_long_as_it_is_held(spec):
    stream, blocks = network(spec)
    state, seen = stream.open(torch.randn(2, 3, 6, dtype=torch.float64), CTX), {}
    for connections in blocks:
        state = run(connections, state)
        for name, tensor in named_tensors(state).items():
            if ".source." in name:
                assert torch.equal(seen.setdefault(name, tensor.clone()), tensor)


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_changed_in_place(spec):
    stream, blocks = network(spec)
    state = stream.open(torch.randn(2, 3, 6, dtype=torch.float64), CTX)
    for connections in blocks:
        before = {name: t.clone() for name, t in named_tensors(state).items()}
        after = run(connections, state)
        held = named_tensors(state)
        assert held.keys() == before.keys()
        assert all(torch.equal(held[name], before[name]) for name in before)
        state = after


# pitfalls, recomputation: "only the listed earlier states need grad, the direct input does not"
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
def test_every_state_of_a_block_gets_its_gradient(spec, recompute):
    stream, blocks = network(spec)
    state = stream.open(torch.randn(2, 3, 6, dtype=torch.float64), CTX)
    for connections in blocks[:2]:
        state = run(connections, state)
    leaves, structure = pytree.tree_flatten(pytree.tree_map(lambda t: t.detach().clone(), state))
    earlier = [
        leaf.requires_grad_()
        for name, leaf in zip(named_tensors(state), leaves, strict=True)
        if "source" in name
    ]

    def last_blocks(*tensors):
        inner = pytree.tree_unflatten(list(tensors), structure)
        for connections in blocks[2:]:
            inner = run(connections, inner)
        return stream.close(inner, CTX)

    out = checkpoint(last_blocks, *leaves, use_reentrant=False) if recompute else last_blocks(*leaves)
    assert out.requires_grad
    gradients = torch.autograd.grad(out.square().sum() + out.sum(), earlier)
    assert all(bool(g.any()) for g in gradients)


# pitfalls, recomputation: a block gets earlier states under activation checkpointing
@pytest.mark.parametrize("spec", SPECS)
def test_checkpointing_changes_no_gradient(spec):
    config = twoaxis.ModelConfig(vocab_size=19, d_model=12, n_blocks=4, n_heads=3, depth=spec)
    (model,) = randomised(twoaxis.Decoder(config))
    tokens = torch.randint(19, (2, 5))
    kept = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        model.loss(tokens, tokens.roll(1, 1)).backward()
        kept.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(
        *kept, strict=True
    ):  # reads push where blocks are recomputed: another order of sums
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12 if one.dtype == torch.float64 else 1e-6)


# pitfalls, batches: "B=0, T=4; B=2, T=0; forward through each mixer and method"
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["B0", "T0"])
def test_empty_batches(spec, shape):
    model = twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=19, d_model=12, n_blocks=2, n_heads=3, depth=spec))
    logits = model(torch.zeros(shape, dtype=torch.long))
    assert logits.shape == (*shape, 19)
    logits.sum().backward()


# pitfalls, compilation: "fullgraph works for the whole model"
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does it
@pytest.mark.parametrize(
    "spec",
    ["attnres(block_sublayers=3)", *(pytest.param(s, marks=pytest.mark.full) for s in (SPECS[1], SPECS[5]))],
)
def test_the_whole_model_is_one_graph(spec):
    model = twoaxis.Decoder(twoaxis.ModelConfig(vocab_size=19, d_model=12, n_blocks=2, n_heads=3, depth=spec))
    tokens = torch.randint(19, (2, 5))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), model(tokens))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_state_has_the_configured_dtype(spec, dtype):
    sizes = {"vocab_size": 19, "d_model": 12, "n_blocks": 3, "n_heads": 3}
    model = twoaxis.Decoder(twoaxis.ModelConfig(depth=spec, state_dtype=dtype, **sizes))
    for cores in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with cores:
            _, states = model(torch.randint(19, (2, 5)), return_states=True)
        for n in range(4):
            held = named_tensors(states[f"block.{n}"]).values()
            assert {str(t.dtype) for t in held} == {f"torch.{dtype}"}
