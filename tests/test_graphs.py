"""What a method leaves behind after a step (nothing) and what it compiles to (one graph per block)."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import twoaxis
from configurations import SEQUENCES, Case, depths, method_of, tokens
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


WHOLE = [*map(Case, depths()), *(Case("additive", sequence) for sequence in SEQUENCES)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.depth == "hyper_connections" else pytest.mark.full) for c in WHOLE],
    ids=str,
)
def test_the_whole_model_is_one_graph(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # every depth method and every mixer: embeddings, layers and head in one graph; results and gradients as without
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    model = case.model(n_blocks=2)
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


GRAPHS = [  # of 12 blocks
    ("additive", 1),
    ("hyper_connections", 1),
    ("dca(k=1)", 4),  # 1, 2, 3 sources; then 3 with the middle as one, however many blocks follow
    ("dca(k=2)", 5),
    ("ddl", 1),
    ("ddl(value_dim=4)", 1),
    ("mhc", 2),  # the first sublayer mixes nothing
    ("attnres", 12),  # one for every number of sources
    ("denseformer", 12),
    # through a window: one more when an index is no longer what it was at first, one where the last block keeps less
    ("dca(k=1, middle='drop', grn='v2')", 3),
    ("attnres(window_sources=2)", 4),
    ("attnres(window_sources=1)", 3),
    ("muddformer(window_blocks=1, ways=2)", 3),
    ("depth_conv(kernel=2, shared=False)", 4),
    ("depth_window(window_blocks=2, shared=False)", 4),
    ("hybrid(window_blocks=2, gate='head', shared=False)", 4),
    ("elc_bert(window_blocks=2)", 4),
    ("vertical_attention(window_blocks=2)", 4),
    ("denseformer(window_blocks=2)", 3),
    ("delta_attnres(window_sources=2)", 4),
    ("value_residual", 3),  # the first attention's block, those that read its values, the last of them
    ("value_residual(form='learnable')", 3),
    ("value_residual(form='learnable_plus')", 3),
    ("svformer", 3),
]
ATTENDING = ("dca", "muddformer", "hybrid", "value_residual", "svformer")
ALWAYS = ("additive", "hyper_connections", "dca(k=1, middle='drop', grn='v2')")


@pytest.mark.parametrize(
    ("depth", "most"),
    [pytest.param(*c, marks=[] if c[0] in ALWAYS else pytest.mark.full) for c in GRAPHS],
)
def test_alike_blocks_share_a_graph(depth: str, most: int) -> None:
    # 12 blocks with an index attribute: the compile count does not grow beyond what shapes force
    sublayer = "attention" if method_of(depth) in ATTENDING else "mlp"
    model = Case(depth).model(torch.float32, n_blocks=12, sequence=[sublayer])
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
