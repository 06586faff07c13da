"""Gated reads by weights that the loop knows: every gradient equals that of reads that are differentiated alone."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from pull_cases import (
    USES,
    agree_after_an_interrupted_pass,
    agree_in_a_step,
    agree_with_hooks,
    both,
    close,
    model,
)

from configurations import tokens
from twoaxis.errors import InputError
from twoaxis.ops import choice, gated_mix, gated_sums, known_gates, rebuilt, reference
from twoaxis.ops.known_gates import Gated, gained, gates_of
from twoaxis.ops.native import gated_mix as native
from twoaxis.ops.owed import Sums

METHODS = {  # known reads of three blocks
    "dca": 4,
    "dca(k=1)": 4,
    "dca(k=2, gate_norm=True)": 4,
    "dca(k=1, middle='drop')": 4,
    "dca(gate_norm=True)": 4,
    "dca(grn='v2')": 0,
    "dca(grn='v1')": 0,
}


@pytest.fixture
def reads(monkeypatch):
    """The places of the known reads that ran backward."""
    seen, init = [], known_gates.Gated.__init__

    def noting(self, *args):
        init(self, *args)
        seen.append(self.place[1])

    monkeypatch.setattr(known_gates.Gated, "__init__", noting)
    return seen


def network(known=4, n=4, lead=(3, 4), d=6, dtype=torch.float64, eps=0.01, gains=True):
    """Leaves x, then b, w and gain of each read; f(read) -> leaves, sources, outputs: every source is a function of the
    last read's two outputs, or, for the last but one, of one of them."""
    torch.manual_seed(1)
    leaves = [torch.randn(*lead, d, dtype=dtype)]
    for i in range(n):
        leaves += [torch.randn(s, dtype=dtype) for s in ((2, i + 1, d), (2, d), (d,))]

    def run(f=gated_mix):
        given = [x.clone().requires_grad_() for x in leaves]
        gates = [
            (b, w, g if gains else None)
            for b, w, g in zip(given[1::3], given[2::3], given[3::3], strict=True)
        ]
        with rebuilt.loop(f is gated_mix, gates=lambda: gates[:known]):
            sources, outs = [given[0].tanh()], []
            for i, (b, w, gain) in enumerate(gates):
                one, other = f(tuple(sources), b, gained(w, gain), norm_eps=eps)
                outs.append(one if i == n - 2 else one * other.cos())
                sources.append((outs[-1] + 0.1 * w[0]).sin())
        return given, sources, outs

    return run


PAIR = gated_mix, reference.gated_mix


PARTS = pytest.mark.parametrize(
    "inputs", [slice(None), slice(0, 1), slice(4, 8)], ids=["all", "x", "two reads"]
)


@PARTS
@pytest.mark.parametrize(
    ("known", "eps"), [(4, 0.01), (3, None)], ids=["all known", "three of four, raw score"]
)
@pytest.mark.parametrize(
    "use", [u for n, u in USES.items() if "extra" not in n], ids=[n for n in USES if "extra" not in n]
)
def test_any_backward_pass(use, known, eps, inputs, reads):
    """Partial, repeated and interrupted passes, expanded gradients, outputs without a gradient."""
    close(*both(network(known, n=5 if known == 4 else 4, eps=eps), *PAIR, use, inputs), 1e-12)
    assert reads
    assert set(reads) <= {0, 2, 4, 6}


@PARTS
def test_extra_losses_on_sources(inputs, reads):
    def losses(sources, outs):
        return [sources[-1].sum() + sources[1].square().sum() + sources[3].exp().sum()]

    close(*both(network(gains=False), *PAIR, losses, inputs), 1e-12)
    assert reads


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float64, "auto"),
        (torch.float32, "auto"),
        pytest.param(torch.float32, "plain", marks=pytest.mark.full),
    ],
    ids=["float64", "float32", "float32-plain"],
)
@pytest.mark.parametrize("depth", METHODS)
def test_a_step(depth, dtype, backend, pushed, monkeypatch, reads):
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    agree_in_a_step(depth, dtype, pushed, reads, METHODS[depth])


def test_hooks_on_sources_and_their_gradients(reads):
    agree_with_hooks(network(), *PAIR)
    assert reads


def test_one_gate_for_two_reads_and_sources_seen_twice_or_in_another_order(reads):
    torch.manual_seed(2)
    x, b, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (1, 2, 6), (1, 6)))
    found = []
    for f in (gated_mix, reference.gated_mix):
        with rebuilt.loop(f is gated_mix, gates=lambda: [(b, w, None)]):
            a = x.sin()
            (c,) = f((x * 2, a), b, w)
            c = c.cos()
            every = *f((c, a), b, w), *f((a, a), b, w, norm_eps=0.1), *f((a, c), b, w.detach())
        found.append(torch.autograd.grad(sum(every).square().sum(), (x, b, w)))
    close(*found, 1e-12)
    assert reads == [0] * 3


def test_an_interrupted_pass_leaves_nothing_to_the_next():
    """The first pass asks for a source alone, so that the gates' node does not run."""
    agree_after_an_interrupted_pass(network(), *PAIR)


def test_odd_layouts_and_no_tokens(reads):
    b, w = torch.randn(3, 2, 6).transpose(0, 1).requires_grad_(), torch.randn(6, 2).T.requires_grad_()
    for shape in ((2, 3, 6), (0, 3, 6)):
        x = torch.randn(shape, requires_grad=True)
        found = []
        for f in (gated_mix, reference.gated_mix):
            with rebuilt.loop(f is gated_mix, gates=lambda: [(b, w, None)]):
                sources = (x.sin(), x.mT.contiguous().cos().mT, (x.sum(0, keepdim=True) + 1).expand(shape))
                out = torch.cat(f(sources, b, w), -1)
            found.append(torch.autograd.grad(out, (x, b, w), torch.ones(1).expand(out.shape)))
        close(*found, 1e-5)
    assert len(reads) == 2


def test_bfloat16(pushed, reads):
    m, x = model("dca(gate_norm=True)", torch.bfloat16), tokens(1, 5)
    grads = torch.autograd.grad(m.loss(x, x), list(m.parameters()))
    close(grads, pushed(lambda: torch.autograd.grad(m.loss(x, x), list(m.parameters()))), 0.02)
    assert len(reads) == 4


def test_what_is_not_defined_says_so():
    _, sources, _ = network()()
    sources[-1].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        sources[-1].sum().backward()
    given, sources, _ = network()()
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(sources[-1].sum(), given[0], create_graph=True)
    for changed in (lambda given, sources: sources[1], lambda given, sources: given[4]):
        given, sources, _ = network(gains=False)()
        with torch.no_grad():
            changed(given, sources).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sources[-1].sum().backward()


def test_shapes_that_do_not_fit_are_refused_as_anywhere():
    x, b, w = (torch.randn(s, requires_grad=True) for s in ((3, 6), (1, 2, 6), (1, 6)))
    for sources in ((), (x,), (x, x[:2]), (x[:, :5], x[:, :5])):
        with rebuilt.loop(True, gates=lambda: [(b, w, None)]), pytest.raises(InputError):
            gated_mix(sources, b, w)


def test_what_falls_back(reads):
    """Gates nobody named or frozen, weights by source, sources without a gradient or of two dtypes."""
    x, b, w, scalar = (torch.randn(s, requires_grad=True) for s in ((3, 6), (1, 2, 6), (1, 6), (1, 2)))
    other, fixed = torch.randn(1, 2, 6, requires_grad=True), torch.randn(3, 6)
    half = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    cases = (
        ((x, x), other, b),
        ((x, x), b.detach(), b.detach()),
        ((x, x), scalar, scalar),
        ((x, fixed), b, b),
        ((x, half), b, b),
    )
    for sources, weights, known in cases:
        with rebuilt.loop(True, gates=lambda known=known: [(known, w, None)]):
            found = torch.autograd.grad(gated_mix(sources, weights, w)[0].sum(), x)
        close(found, torch.autograd.grad(reference.gated_mix(sources, weights, w)[0].sum(), x), 1e-6)
    assert reads == []


def test_a_model_under_fsdp_names_none():
    made = model("dca", torch.float32)
    assert len(gates_of(made)) == 4
    made.blocks[0].unshard = lambda: None  # what FSDP gives to a module
    assert gates_of(made) == []


def test_checkpointed_blocks_and_recomputed_models_differentiate_by_themselves(reads):
    m, x = model("dca", torch.float64), tokens(2, 7)
    m.checkpointing = True
    m.train()
    found = torch.autograd.grad(m.loss(x, x), list(m.parameters()))
    assert reads == []
    m.checkpointing = False
    close(found, torch.autograd.grad(m.loss(x, x), list(m.parameters())), 1e-12)
    assert len(reads) == 4


@needs_kernel("gated_pull")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("eps", [None, 0.01], ids=["raw score", "normed score"])
def test_the_kernel_equals_the_plain_sums(eps, dtype):
    """Odd widths, few tokens, every way to group gradients."""
    torch.manual_seed(3)
    library, bound = choice.library("gated_pull"), torch.finfo(dtype).eps / 2 + 1e-5
    sums = Sums(0), Sums(0)
    for N, d, S in ((1, 24, 1), (33, 33, 2), (129, 344, 5), (2, 3, 7), (19, 16, 11)):
        x, every, wide = torch.randn(N, d).to(dtype), [], []
        for s in range(S):
            b, w = torch.randn(2, s + 1, d), torch.randn(2, d)
            grads = [torch.randn(N, d).to(dtype), None if s % 3 == 1 else torch.randn(N, d).to(dtype)]
            every += Gated(sums, (0, 0), eps, b, w, grads).parts(s)
            exact = [None if g is None else g.double() for g in grads]
            wide += Gated(sums, (0, 0), eps, b.double(), w.double(), exact).parts(s)
        exact = known_gates.gathered(eps, x.double(), wide)
        for run in (lambda *given: native.gathered(library, *given), known_gates.gathered):
            for one, other in zip(run(eps, x, every), exact, strict=True):
                assert error(one, other) <= bound


def test_plain_sums_are_the_reference():
    torch.manual_seed(4)
    x, b, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 5), (2, 5), (2, 5)))
    ups = [torch.randn(7, 5, dtype=torch.float64) for _ in range(2)]
    found = gated_sums.back(0.1, b.detach(), w.detach(), x.detach(), ups)
    reads = reference.gated_mix((x,), b.unsqueeze(1), w, norm_eps=0.1)
    close(found, torch.autograd.grad(reads, (x, b, w), ups), 1e-12)
