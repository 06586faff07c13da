"""Mixes of heads: against one product of all of them, and sources that gather against mixes that differentiate."""

import pytest
import torch
from agreement import agree, error, results, rounded_once
from native_cases import needs_kernel
from pull_cases import (
    BOUNDS,
    USES,
    agree_after_an_interrupted_pass,
    agree_in_a_step,
    agree_with_hooks,
    both,
    close,
    model,
)
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from configurations import tokens
from twoaxis.errors import InputError
from twoaxis.ops import choice, head_mix, head_pull, head_rows, rebuilt, reference
from twoaxis.ops.head_pull import HeadMixed
from twoaxis.ops.native import head_mix as native
from twoaxis.ops.token_pull import Ahead


@pytest.fixture
def mixes(monkeypatch):
    """How many sources the pulled mixes had that ran backward."""
    seen, init = [], HeadMixed.__init__

    def noting(self, *args):
        init(self, *args)
        seen.append(len(self.parts))

    monkeypatch.setattr(HeadMixed, "__init__", noting)
    return seen


def call(f, widths=(3, 2)):
    return lambda w, *sources: torch.cat([y.mT for y in f(sources, w, widths)], -2)


def tensors(heads, made, lead=(2, 4), D=5, dtype=torch.float64):
    return [
        torch.randn(made, sum(heads), dtype=dtype),
        *(torch.randn(*lead, D, h, dtype=dtype) for h in heads),
    ]


@pytest.mark.parametrize("lead", [(2, 4), (), (1,), (3, 2, 2), (0, 4), (2, 0)], ids=str)
def test_equals_the_reference(lead):
    for heads, made in (((2,), 2), ((1, 1, 1), 1), ((2, 2), 3), ((3, 1, 2, 4), 2)):
        agree(call(head_mix), call(reference.head_mix), tensors(heads, made, lead), 1e-13)


def test_rows_are_parts_side_by_side():
    parts = [torch.randn(2, 4, 3, w, dtype=torch.float64) for w in (3, 2)]  # (B, T, H, width)
    agree(lambda *x: head_rows(*x), lambda *x: torch.cat(x, -1).mT, parts, 0)
    with torch.no_grad():
        assert torch.equal(head_rows(*parts), torch.cat(parts, -1).mT)  # as in a step of decoding


def test_bfloat16_is_rounded_once():
    w, *sources = tensors((3,) * 20, 3, (3, 50), 5, torch.float32)
    inputs = [w, *(x.bfloat16() for x in sources)]
    exact = results(call(reference.head_mix), [x.double() for x in inputs])
    rounded_once(results(call(head_mix), inputs), exact)


def test_saves_sources_and_weight_alone():
    w, *sources = (x.requires_grad_() for x in tensors((2, 2, 2), 2))
    kept: set[int] = set()
    with saved_tensors_hooks(lambda x: (kept.add(x.untyped_storage().data_ptr()), x)[1], lambda x: x):
        head_mix(sources, w, (5,))
    assert kept == {x.data_ptr() for x in (*sources, w)}


def test_autocast_and_layout():
    """Pitfall: transposed, strided, expanded and sliced views -> equal to contiguous copies."""
    big = torch.randn(2, 4, 10, 6)
    odd = [big[..., ::2, :2], big[..., 4:9, 3:5], torch.randn(2, 5, 4, 2).mT.movedim(-2, -1)[..., :5, :2]]
    odd[2] = big[0, 0, :5, :2].expand(2, 4, 5, 2)
    w = torch.randn(6, 3).mT
    plain = results(call(head_mix), [w.contiguous(), *(x.contiguous() for x in odd)])
    with torch.autocast("cpu", torch.bfloat16):
        found = results(call(head_mix), [w, *odd])
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("grad", [True, False], ids=["training", "a step"])
@pytest.mark.parametrize("loop", [True, False], ids=["loop", "alone"])
def test_mixed_dtypes_and_autocast(grad, loop):
    """Sums in at least float32, results in the dtype that holds all sources."""
    w, *given = tensors((2, 3, 2), 3, (4,), 5, torch.float32)
    bounds = {torch.bfloat16: 2.0**-8, torch.float32: 1e-6, torch.float64: 1e-12}
    sources = [x.to(kind).requires_grad_(grad) for x, kind in zip(given, bounds, strict=True)]
    for n, (kind, bound) in enumerate(bounds.items(), 1):
        xs, weight = sources[:n][::-1], w[:, : (2, 5, 7)[n - 1]]
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16), rebuilt.loop(loop):
            (found,) = head_mix(xs, weight, (5,))
        (exact,) = reference.head_mix([x.double() for x in xs], weight.double(), (5,))
        assert found.dtype == kind
        assert error(found.detach(), exact.detach()) < bound


def test_mixes_of_other_dtypes_gather_one_gradient():
    w, *sources = tensors((2, 3), 3, (4,), 5, torch.float32)
    found = []
    for f in PAIR:
        xs = [x.clone().requires_grad_() for x in (w, sources[0], sources[1].double())]
        with rebuilt.loop(f is head_mix):
            loss = f(xs[1:], xs[0], (5,))[0].sum() + f(xs[1:2], xs[0][:, :2], (5,))[0].cos().sum()
        found.append(torch.autograd.grad(loss, xs))
    close(*found, 1e-6)


def test_gradcheck():
    assert gradcheck(call(head_mix), [x.requires_grad_() for x in tensors((2, 1), 2, (2,))])


@pytest.mark.parametrize(
    ("shapes", "widths", "said"),
    [
        ([(2, 5)], (5,), "sources none"),
        ([(2, 5), (4, 5, 2), (3, 5, 3)], (5,), "alike but for H_m"),
        ([(2, 5), (5,)], (5,), "alike but for H_m"),
        ([(2, 4), (4, 5, 2), (4, 5, 3)], (5,), r"give \(H, 5\)"),
        ([(5,), (4, 5, 2), (4, 5, 3)], (5,), r"weight \(5,\)"),
        ([(2, 5), (4, 5, 2), (4, 5, 3)], (3, 1), "parts that make 5"),
    ],
    ids=["none", "tokens", "no heads", "columns", "vector", "widths"],
)
def test_what_does_not_fit_is_refused(shapes, widths, said):
    w, *sources = map(torch.zeros, shapes)
    for f in (head_mix, reference.head_mix):
        with pytest.raises(InputError, match=said):
            f(tuple(sources), w, widths)


def test_integers_are_refused():
    with pytest.raises(InputError, match="give a floating-point dtype"):
        head_mix((torch.ones(4, 5, 2, dtype=torch.int64),), torch.ones(2, 2), (5,))


def test_other_kinds_of_arguments_are_refused():
    x, w = torch.ones(4, 5, 2), torch.ones(2, 2)
    for widths in ((-1, 6), 5, (2.0, 3.0)):
        with pytest.raises(InputError, match="give a tuple of integers above 0"):
            head_mix((x,), w, widths)
    with pytest.raises(InputError, match="not a stacked tensor"):
        head_mix(x, w, (5,))
    for parts in ((), (x, x[1:]), (x[0, 0],)):
        with pytest.raises(InputError, match=r"give at least one, \(\.\.\., H, width\)"):
            head_rows(*parts)


def network(n=5, heads=(2, 1, 3, 2, 2, 1), lead=(3, 4), D=4, dtype=torch.float64):
    """Leaves x, R; f(mix) -> leaves, sources, mixes: every source is a function of the last mix's first part."""
    torch.manual_seed(1)
    leaves = [torch.randn(*lead, D, heads[0]).to(dtype)]
    leaves += [(torch.randn(heads[i], sum(heads[:i])) * 0.5).to(dtype) for i in range(1, n + 1)]

    def run(f=head_mix, computed=None):
        given = [x.to(computed, copy=True).requires_grad_() for x in leaves]
        with rebuilt.loop(f is head_mix):
            sources, outs = [given[0].tanh()], []
            for W in given[1:]:
                keys, values = f(tuple(sources), W, (D - 1, 1))
                outs.append(values)
                sources.append(head_rows(keys.sin(), keys[..., :1]) + values.mean())
        return given, sources, outs

    return run


PAIR = head_mix, reference.head_mix


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("inputs", [slice(None), slice(0, 1), slice(2, 4)], ids=["all", "x", "two mixes"])
def test_any_backward_pass(use, inputs, mixes):
    """Partial, repeated and interrupted passes, expanded gradients, losses on sources and on single parts."""
    close(*both(network(), *PAIR, use, inputs), 1e-12)
    assert mixes
    assert set(mixes) <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
@pytest.mark.parametrize("lead", [(0, 4), (1,), (2, 3)], ids=str)
def test_sizes_and_dtypes(lead, dtype, mixes):
    use = USES["reads alone"]
    close(*both(network(lead=lead, dtype=dtype), *PAIR, use, slice(None)), BOUNDS[dtype])
    assert mixes


def test_bfloat16_in_the_loop(mixes):
    """Gradients are kept in bfloat16, as autograd would, and no sum is much worse than by mixes outside of the loop."""
    run, found = network(dtype=torch.bfloat16), []
    for f, dtype in (
        (head_mix, None),
        (lambda *args: head_mix(*args), None),
        (reference.head_mix, torch.float64),
    ):
        given, sources, _ = run(f, dtype)
        found.append([g.double() for g in torch.autograd.grad(sources[-1].square().sum(), given)])
    assert len(mixes) == 5
    for pulled, apart, exact in zip(*found, strict=True):
        assert error(pulled, exact) <= 2 * error(apart, exact) + 2**-7


def test_hooks_on_sources_and_their_gradients(mixes):
    agree_with_hooks(network(), *PAIR, lambda sources, outs: sources[-1].sum() + outs[2].sum())
    assert mixes


def test_an_interrupted_pass_leaves_nothing_to_the_next():
    agree_after_an_interrupted_pass(network(), *PAIR)


def test_a_source_that_is_seen_twice_in_any_order(mixes):
    torch.manual_seed(2)
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 5, 2), (2, 6)))
    found = []
    for f in PAIR:
        with rebuilt.loop(f is head_mix):
            a = x.sin()
            (b,) = f((a, x * 2, a), w, (5,))
            b = b.mT
            loss = f((b, a, b), w.cos(), (5,))[0] + f((a, b), w[:, :4].detach(), (5,))[0]
        found.append(torch.autograd.grad(loss.square().sum(), (x, w)))
    close(*found, 1e-12)
    assert sorted(mixes) == [2, 3, 3]


def test_what_is_not_defined_says_so():
    for loop in (True, False):
        x, w = torch.randn(3, 5, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
        with rebuilt.loop(loop):
            loss = head_mix((x.sin(),), w, (5,))[0].sum()
        with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
            torch.autograd.grad(loss, x, create_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    _, sources, _ = network()()
    with torch.no_grad():
        sources[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sources[-1].sum().backward()


def test_sources_without_a_gradient_fall_back(mixes):
    x, w = torch.randn(3, 5, 2, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    other = torch.randn(3, 5, 2)
    with rebuilt.loop(True):
        found = torch.autograd.grad(head_mix((x, other), w, (5,))[0].sum(), (x, w))
    close(found, torch.autograd.grad(reference.head_mix((x, other), w, (5,))[0].sum(), (x, w)), 1e-6)
    assert mixes == []


@needs_kernel("token_mix")
@pytest.mark.parametrize(
    "use",
    [u for name, u in USES.items() if name != "reads alone"],
    ids=[n for n in USES if n != "reads alone"],
)
@pytest.mark.parametrize("inputs", [slice(None), slice(2, 4)], ids=["all", "two mixes"])
def test_sources_that_gather_for_others(use, inputs, monkeypatch):
    """The kernel sums up for several sources at once, of different numbers of heads; partial passes and those after."""
    made, init = [], Ahead.__init__
    monkeypatch.setattr(Ahead, "__init__", lambda self, part: (made.append(part), init(self, part))[1])
    sizes = {"n": 11, "heads": (2, 1, 3, 2, 2, 1, 2, 3, 1, 1, 2, 2)}
    found = both(network(**sizes, dtype=torch.float32), *PAIR, use, inputs)[0]
    close(found, both(network(**sizes), *PAIR, use, inputs)[1], 1e-5)
    assert len(made) > 3


@needs_kernel("token_mix")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_equals_the_plain_sums(dtype):
    """Lengths that are cut into rows evenly, once or into single numbers; many heads; sources in other memory."""
    library, eps = choice.library("token_mix"), torch.finfo(dtype).eps / 2 + 1e-5
    for length, sizes, made in ((1, (1,), 1), (521, (2, 1), 3), (1024, (3,) * 9, 5), (1042, (1, 4), 17)):
        rows, w = [torch.randn(h, length).to(dtype) for h in sizes], torch.randn(made, sum(sizes))
        rows[-1] = torch.cat((rows[-1], rows[-1]), 1)[:, :length]
        exact = head_pull.chain(w.double().split(sizes, 1), rows)
        assert error(native.mixed(library, w, rows), exact) <= eps
        g, last = torch.randn(made, length).to(dtype), len(sizes) - 1
        left = [(HeadMixed(w, sizes, g, ()), last), (HeadMixed(2 * w, sizes, g, ()), last)]
        wanted = sizes[:-3:-1]
        for part, back in zip(native.gathered(library, left, wanted), w.split(sizes, 1)[::-1], strict=False):
            assert error(part, 3 * back.double().mT @ g.double()) <= eps
        with pytest.raises(TypeError, match="that a mix saw"):
            native.gathered(library, left, (*sizes, 1))


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
def test_a_step(dtype, pushed, mixes):
    agree_in_a_step("lime", dtype, pushed, mixes, 2)


def test_checkpointed_blocks_differentiate_by_themselves(mixes):
    m, x = model("lime", torch.float64), tokens(2, 7)
    m.checkpointing = True
    m.train()
    found = torch.autograd.grad(m.loss(x, x), list(m.parameters()))
    assert mixes == []
    m.checkpointing = False
    close(found, torch.autograd.grad(m.loss(x, x), list(m.parameters())), 1e-12)
    assert mixes == [3, 2]
