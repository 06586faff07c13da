"""Gradients that sources pull equal those that reads push, however a backward pass is run."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from pull_cases import BOUNDS, USES, both, close, model

from configurations import tokens
from twoaxis.ops import depth_read, pulled, rebuilt, reference

METHODS = [
    "attnres",
    "attnres(block_sublayers=3)",
    "attnres(query='input')",
    "attnres(heads=2, window_sources=3)",
    "delta_attnres",
    "depth_window",
]


@pytest.fixture
def gathers(monkeypatch):
    """How many reads each gathered source had."""
    seen, take = [], pulled.Source.take

    def counting(self):
        left = take(self)
        seen.append(len(left))
        return left

    monkeypatch.setattr(pulled.Source, "take", counting)
    return seen


@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
@pytest.mark.parametrize("depth", METHODS)
def test_a_step(depth, dtype, backend, pushed, monkeypatch, gathers):
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    m, x = model(depth, dtype), tokens(2, 7)
    parameters = list(m.parameters())

    def grads():
        return torch.autograd.grad(m.loss(x, x), parameters)

    close(grads(), pushed(grads), BOUNDS[dtype])
    assert max(gathers) > 1


def network(dtype=torch.float64, n=5, lead=(3, 4), d=6):
    """Leaves, and f(leaves) -> sources, reads: a stack in which every source is a function of the last read."""
    torch.manual_seed(1)
    leaves = [torch.randn(*lead, d, dtype=dtype), *(torch.randn(d, dtype=dtype) for _ in range(n))]

    def run(read=depth_read):
        given = [x.clone().requires_grad_() for x in leaves]
        with rebuilt.loop(read is depth_read):
            sources, reads = [given[0].tanh()], []
            for w in given[1:]:
                reads.append(read(w, tuple(sources), output_gain=given[1], output_eps=1e-3))
                sources.append((reads[-1] + 0.1 * w).sin())
        return given, sources, reads

    return run


PAIR = depth_read, reference.depth_read


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("inputs", [slice(None), slice(0, 1), slice(2, 4)], ids=["all", "x", "two queries"])
def test_any_backward_pass(use, inputs, gathers):
    close(*both(network(), *PAIR, use, inputs), 1e-12)
    assert gathers


def test_gradients_of_sources_and_hooks_on_them():
    run, found = network(), []
    for read in (depth_read, reference.depth_read):
        given, sources, _ = run(read)
        sources[1].register_hook(lambda g: 3 * g)
        sources[2].retain_grad()
        (wanted,) = torch.autograd.grad(sources[-1].sum(), sources[3], retain_graph=True)
        sources[-1].sum().backward()
        found.append([wanted, sources[2].grad, *(x.grad for x in given)])
    close(*found, 1e-12)


def test_what_is_not_defined_says_so():
    given, sources, _ = network()()
    sources[-1].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        sources[-1].sum().backward()
    given, sources, _ = network()()
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(sources[-1].sum(), given[0], create_graph=True)


def test_what_nobody_pulled_is_not_pulled_later():
    """A first pass asks for queries alone: reads run, and of the sources only those on the way to one."""
    run, found = network(), []
    for read in (depth_read, reference.depth_read):
        given, sources, _ = run(read)
        torch.autograd.grad(sources[-1].sum(), given[-1], retain_graph=True)
        found.append(torch.autograd.grad(sources[-1].sum(), given))
    close(*found, 1e-12)


def test_a_source_without_gradient_and_one_that_is_seen_twice():
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    fixed = torch.randn(3, 6)
    for sources in (lambda: (x, fixed), lambda: (x * 2,) * 2):
        with rebuilt.loop(True):
            found = torch.autograd.grad(depth_read(w, sources()).sum(), (x, w))
        close(found, torch.autograd.grad(depth_read(w, sources()).sum(), (x, w)), 1e-6)


@needs_kernel("depth_pull")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_equals_the_plain_sum(dtype):
    from twoaxis.ops import choice
    from twoaxis.ops.native import depth_pull

    library = choice.library("depth_pull")
    for N, d, reads in ((1, 24, 1), (33, 33, 2), (129, 344, 5), (2, 3, 7), (0, 8, 2)):
        x = torch.randn(N, d).to(dtype)
        left = []
        for s in range(reads):
            n, rows = s + 1, N if s % 3 == 2 else 1
            parts = (torch.randn(N, d), torch.randn(n, N, 1), torch.randn(n, N, 1), torch.randn(n, N))
            left.append((pulled.Left(*parts, torch.randn(rows, d)), s))
        wide = [
            (pulled.Left(*(getattr(r, f).double() for f in pulled.Left.__annotations__)), i) for r, i in left
        ]
        exact = pulled.gathered(x.double(), wide)
        assert error(depth_pull.gathered(library, x, left), exact) <= 1e-5 + torch.finfo(dtype).eps / 2
        assert error(pulled.gathered(x, left), exact) <= 1e-5 + torch.finfo(dtype).eps / 2
