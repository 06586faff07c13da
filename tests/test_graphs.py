"""What a method leaves behind after a step (nothing) and what it compiles to (one graph per block)."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import twoaxis
from configurations import Case, depths, tokens
from twoaxis.depth import named_tensors
from twoaxis.train.device import allow_graphs

pytestmark = [  # two warnings of the tracer's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
QUICK = {"additive", "attnres", "ddl(value_dim=4, compressor='token')"}
COMPILED = [pytest.param(d, marks=[] if d in QUICK else pytest.mark.full) for d in depths()]


def live() -> tuple[int, int]:
    """How many tensors exist, and how many of them hold a graph."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return len(found), sum(t.grad_fn is not None for t in found)


@pytest.mark.usefixtures("forgetful")
def test_a_step_leaves_no_graph() -> None:
    # 20 training steps with statistics of the depth state and a loss history: tensors alive are constant
    models = [Case(depth).model(torch.float32, n_blocks=2) for depth in twoaxis.methods("depth")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    history: list[float] = []
    counts = []
    for step in range(20):
        for model, optimizer in zip(models, optimizers, strict=True):
            logits, states = model(tokens(2, 3, seed=step), return_states=True)
            loss = logits.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes = [t.detach().norm().item() for s in states.values() for t in named_tensors(s).values()]
            history += [loss.item(), *sizes]
            del logits, states, loss
        if step in (1, 19):
            counts.append(live())
    assert counts[0] == counts[1]
    assert all(torch.tensor(history).isfinite())


@pytest.mark.parametrize(
    "depth", [pytest.param(d, marks=[] if d == "hyper_connections" else pytest.mark.full) for d in depths()]
)
def test_the_whole_model_is_one_graph(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # embeddings, every layer and the head in one graph; results and gradients as without
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    model = Case(depth).model(n_blocks=2)
    torch._dynamo.reset()
    counter = CompileCounter()
    whole = torch.compile(model, backend=counter, fullgraph=True)
    grads = []
    for run in (model, whole):
        out = run(tokens())
        grads.append(torch.autograd.grad(out.square().mean(), list(model.parameters()), allow_unused=True))
    assert counter.frame_count == 1
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("depth", COMPILED)
def test_blocks_compile_whole(depth: str) -> None:
    # blocks compiled one by one with their index: no graph break, results and gradients as without
    plain, compiled = (Case(depth).model(n_blocks=2) for _ in range(2))
    torch._dynamo.reset()
    counter = CompileCounter()
    for block in compiled.blocks:
        block.compile(backend=counter, fullgraph=True)
    for model in (plain, compiled):
        model.loss(tokens(), tokens(seed=2)).backward()
    assert 1 <= counter.frame_count <= len(compiled.blocks)
    torch.testing.assert_close(compiled(tokens()), plain(tokens()), rtol=0, atol=1e-12)
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("depth", "most"),
    [
        ("additive", 1),
        ("hyper_connections", 1),
        pytest.param("ddl", 1, marks=pytest.mark.full),
        pytest.param("ddl(value_dim=4)", 1, marks=pytest.mark.full),
        pytest.param("mhc", 2, marks=pytest.mark.full),  # the first sublayer mixes nothing
        pytest.param("attnres", 12, marks=pytest.mark.full),  # one for every number of sources
        pytest.param("denseformer", 12, marks=pytest.mark.full),
    ],
)
def test_alike_blocks_share_a_graph(depth: str, most: int) -> None:
    # 12 blocks with an index attribute: the compile count does not grow beyond what shapes force
    model = Case(depth).model(torch.float32, n_blocks=12, sequence=["mlp"])
    torch._dynamo.reset()
    counter = CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's own, to be put back
        allow_graphs(12)
        for block in model.blocks:
            block.compile(backend=counter, fullgraph=True)
        for _ in range(2):
            model(tokens())
    torch._dynamo.reset()
    assert counter.frame_count == most
