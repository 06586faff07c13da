"""Reads by queries that the loop knows: every gradient equals that of reads that are differentiated by themselves."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from pull_cases import USES, agree_after_an_interrupted_pass, both, close, model

from configurations import tokens
from twoaxis.ops import choice, depth_read, known_sums, rebuilt, reference
from twoaxis.ops.native import known_read as native
from twoaxis.ops.owed import Sums
from twoaxis.ops.token_read import Options


@pytest.fixture
def reads(monkeypatch):
    """The rows of the known reads that ran backward."""
    seen, init = [], known_sums.Later.__post_init__

    def noting(self):
        seen.append(self.row)
        init(self)

    monkeypatch.setattr(known_sums.Later, "__post_init__", noting)
    return seen


def network(known, n=5, lead=(3, 4), d=6, dtype=torch.float64, gain=None, eps=1e-3):
    """Leaves x, queries, key gains; f(read) -> leaves, sources, reads: every source is a function of the last read."""
    torch.manual_seed(1)
    leaves = [torch.randn(*lead, d, dtype=dtype), *(torch.randn(d, dtype=dtype) for _ in range(2 * n))]

    def run(read=depth_read):
        given = [x.clone().requires_grad_() for x in leaves]
        pairs = list(zip(given[1 : n + 1], given[n + 1 :], strict=True))
        norm = {} if eps is None else {"output_gain": given[1] if gain is None else gain, "output_eps": eps}
        with rebuilt.loop(read is depth_read, lambda: pairs[:known]):
            sources, outs = [given[0].tanh()], []
            for w, g in pairs:
                outs.append(read(w, tuple(sources), key_gain=g, **norm))
                sources.append((outs[-1] + 0.1 * w).sin())
        return given, sources, outs

    return run


PAIR = depth_read, reference.depth_read


@pytest.mark.parametrize("known", [5, 3], ids=["all known", "three of five"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "inputs",
    [slice(None), slice(0, 1), slice(2, 4), slice(7, 8)],
    ids=["all", "x", "two queries", "a gain"],
)
def test_any_backward_pass(use, inputs, known, reads):
    """Partial, repeated and interrupted passes, expanded gradients, losses on sources."""
    close(*both(network(known), *PAIR, use, inputs), 1e-12)
    assert reads
    assert set(reads) <= set(range(known))


@pytest.mark.parametrize("eps", [None, 0.0, 1e-6, 1.0])
def test_with_and_without_an_output_norm(eps, reads):
    close(*both(network(5, eps=eps), *PAIR, USES["the end"], slice(None)), 1e-11)
    assert len(reads) == 5


@pytest.mark.parametrize("smallest", [0.0, 1e-30, -1e-10])
def test_a_gain_that_h_cannot_be_divided_by(smallest, reads):
    gain = torch.tensor([1.0, smallest, -2.0, 0.5, smallest, 3.0], dtype=torch.float64, requires_grad=True)
    run, found = network(5, gain=gain), []
    for read in (depth_read, reference.depth_read):
        given, sources, _ = run(read)
        found.append(torch.autograd.grad(sources[-1].sum(), [*given, gain]))
    close(*found, 1e-12)
    assert len(reads) == 5


def test_a_query_of_two_reads_and_sources_seen_twice_or_in_another_order(reads):
    torch.manual_seed(2)
    x, w, g = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (6,), (6,)))
    found = []
    for read in (depth_read, reference.depth_read):
        with rebuilt.loop(read is depth_read, lambda: [(w, g)]):
            a = x.sin()
            b = read(w, (x * 2, a), key_gain=g).cos()
            c = read(w, (b, a, a), key_gain=g) + read(w, (a,), key_gain=g)
        found.append(torch.autograd.grad(c.square().sum(), (x, w, g)))
    close(*found, 1e-12)
    assert reads == [0] * 3


def test_modules_that_share_a_query(reads):
    """Two of three modules name the same pair: their reads are one query's, and the third's keeps its own."""
    x, w, other = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (6,), (6,)))
    found = []
    for read in (depth_read, reference.depth_read):
        with rebuilt.loop(read is depth_read, lambda: [(w, None), (w, None), (other, None)]):
            a = x.sin()
            b = read(w, (a,)) + a
            c = read(other, (a, read(w, (b, a))))
        found.append(torch.autograd.grad(c.square().sum(), (x, w, other)))
    close(*found, 1e-12)
    assert sorted(set(reads)) == [0, 1]


def test_an_interrupted_pass_leaves_nothing_to_the_next():
    """The first pass asks for a source alone, so that the queries' node does not run."""
    agree_after_an_interrupted_pass(network(5), *PAIR)


def test_what_is_not_defined_says_so():
    given, sources, _ = network(5)()
    sources[-1].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        sources[-1].sum().backward()
    given, sources, _ = network(5)()
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(sources[-1].sum(), given[0], create_graph=True)
    given, sources, _ = network(5)()
    with torch.no_grad():
        sources[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sources[-1].sum().backward()


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        ("attnres", 6),
        ("attnres(block_sublayers=3)", 6),
        ("attnres(query='input')", 0),
        ("attnres(heads=2)", 0),
        ("delta_attnres", 5),
        ("delta_attnres(gate='alpha', key_gain=False)", 5),
        ("delta_attnres(value_read=True)", 5),
        ("delta_attnres(null_source=True)", 0),
        ("delta_attnres(pre_gated=True)", 0),
    ],
)
def test_which_reads_of_a_model(depth, expected, reads):
    made, x = model(depth, torch.float64), tokens(2, 7)
    made.loss(x, x).backward()
    assert len(reads) == expected


@pytest.mark.parametrize(("eps", "known"), [(1e-3, 5), (None, 0)], ids=["output norm", "none"])
def test_a_rounded_sum_is_no_output_to_compare_with(eps, known, reads):
    """In bfloat16 <g, h> is taken of the output only where an output norm makes it no difference."""
    _, sources, _ = network(5, dtype=torch.bfloat16, eps=eps)()
    sources[-1].sum().backward()
    assert len(reads) == known


@needs_kernel("known_read")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernels_equal_the_plain_sums(dtype):
    """Odd widths, tokens that fill no vector, every way to group sources and reads."""
    library, puller = choice.library("known_read"), choice.library("known_pull")
    eps = torch.finfo(dtype).eps / 2 + 1e-5
    for N, d, n in ((1, 24, 1), (33, 33, 2), (129, 344, 5), (2, 1, 7), (19, 16, 9)):
        xs, w, gain = [torch.randn(N, d).to(dtype) for _ in range(n)], torch.randn(d), 0.5 + torch.rand(d)
        for norm in (None, 1e-3):
            o = Options(1e-6, 0.7, "softmax", 1, norm, False)
            seen, wide = ([known_sums.Seen.of(x.to(t), 1e-6) for x in xs] for t in (dtype, torch.float64))
            found = native.read(library, o, w, gain if norm else None, seen)
            exact = known_sums.read(o, w.double(), gain.double() if norm else None, wide)
            for a, b in zip(found, exact, strict=True):
                assert error(a, b) <= (eps if a.dtype == dtype else 1e-5)
        out, dots, lse, rho = found
        dy = torch.randn(N, d).to(dtype)
        args = [gain, 1 / gain, out, rho, dy]
        behind = native.back(library, 1e-3, *args)
        for a, b in zip(behind, known_sums.back(1e-3, *(x.double() for x in args)), strict=True):
            assert error(a, b) <= (eps if a.dtype == dtype else 1e-4)
        left, exact_left, sums = [], [], Sums(n)
        for s in range(n):
            parts = (torch.randn(d), torch.randn(N, d).to(dtype), dots, lse, torch.randn(N))
            left.append((known_sums.Later(sums, s, o, *parts), s))
            exact_left.append((known_sums.Later(sums, s, o, *(x.double() for x in parts)), s))
        total, c = native.gathered(puller, xs[0], left)
        exact_total, exact_c = known_sums.gathered(xs[0].double(), exact_left)
        assert error(total, exact_total) <= 2 * eps
        assert error(c, exact_c) <= 1e-4
