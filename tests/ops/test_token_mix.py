"""Mixes by weights of each token: against plain ones, and sources that gather against mixes that differentiate."""

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

from configurations import VARIANTS, tokens
from twoaxis.errors import InputError
from twoaxis.ops import rebuilt, reference, token_mix
from twoaxis.ops.token_pull import Ahead, TokenMixed

DYNAMIC = [
    "muddformer",
    "lime(kind='dynamic')",
    *(
        d
        for d in VARIANTS
        if d.startswith(("muddformer(", "lime(kind='dynamic'")) and "dynamic=False" not in d
    ),
]


@pytest.fixture
def mixes(monkeypatch):
    """How many gradients the pulled mixes had that ran backward."""
    seen, init = [], TokenMixed.__init__

    def noting(self, *args):
        init(self, *args)
        seen.append(len(self.grads))

    monkeypatch.setattr(TokenMixed, "__init__", noting)
    return seen


def call(f):
    return lambda w, *sources: torch.stack(f(sources, w))


def tensors(many, n, lead, d, dtype=torch.float64):
    return [torch.randn(*lead, many, n, dtype=dtype), *(torch.randn(*lead, d, dtype=dtype) for _ in range(n))]


@pytest.mark.parametrize("lead", [(2, 5), (), (1,), (3, 2, 2), (0, 4), (2, 0)], ids=str)
def test_equals_the_reference(lead):
    for many in (1, 2, 3, 4, 6):
        for n in (1, 2, 7):
            for d in (1, 33):
                agree(call(token_mix), call(reference.token_mix), tensors(many, n, lead, d), 1e-13)


def test_bfloat16_is_rounded_once(monkeypatch):
    """Weights in float32, as they are made; 300 tokens are cut into chunks."""
    monkeypatch.setattr("twoaxis.ops.precision.CHUNK", 1 << 10)
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    w, *sources = tensors(3, 6, (3, 100), 24, torch.float32)
    inputs = [w, *(x.bfloat16() for x in sources)]
    found, exact = (
        results(call(token_mix), inputs),
        results(call(reference.token_mix), [x.double() for x in inputs]),
    )
    rounded_once(found, exact)


def test_saves_sources_and_weights_alone():
    w, *sources = (x.requires_grad_() for x in tensors(3, 4, (2, 5), 6, torch.float32))
    kept: set[int] = set()
    with saved_tensors_hooks(lambda x: (kept.add(x.untyped_storage().data_ptr()), x)[1], lambda x: x):
        token_mix(sources, w)
    assert kept == {x.data_ptr() for x in (*sources, w)}


def test_autocast_and_layout():
    """Pitfall: transposed, strided, expanded and sliced views -> equal to contiguous copies."""
    stack = torch.randn(5, 2, 12)
    odd = [stack.transpose(0, 1)[..., ::2], stack.transpose(0, 1)[..., 3:9], stack[0, 0, :6].expand(2, 5, 6)]
    w = torch.randn(5, 2, 3, 2).permute(1, 0, 3, 2)
    plain = results(call(token_mix), [w.contiguous(), *(x.contiguous() for x in odd)])
    with torch.autocast("cpu", torch.bfloat16):
        found = results(call(token_mix), [w, *odd])
    assert all(error(a, b) < 1e-6 for a, b in zip(found, plain, strict=True))


def test_gradcheck():
    assert gradcheck(call(token_mix), [x.requires_grad_() for x in tensors(2, 3, (2,), 4)])


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(2, 4, 3, 2), (2, 4, 6)], r"weights \(2, 4, 3, 2\) for 1 sources"),
        ([(2, 3, 1), (2, 4, 6)], r"weights \(2, 3, 1\)"),
        ([(1,), (2, 4, 6)], r"weights \(1,\)"),
        ([(2, 4, 0, 1), (2, 4, 6)], "O >= 1"),
        ([(2, 4, 3, 2), (2, 4, 6), (2, 6)], "of one shape"),
        ([(2, 4, 3, 0)], "at least one"),
    ],
    ids=["count", "tokens", "no rows", "no sums", "sources", "none"],
)
def test_what_does_not_fit_is_refused(shapes, said):
    w, *sources = map(torch.zeros, shapes)
    with pytest.raises(InputError, match=said):
        token_mix(tuple(sources), w)


def network(many=3, n=5, lead=(3, 4), d=6, dtype=torch.float64):
    """Leaves; f(mix) -> leaves, sources, mixes: weights are made from the newest source, and every source of all sums
    before it but the last, whose own gradient is often missing."""
    torch.manual_seed(1)
    leaves = [torch.randn(*lead, d).to(dtype)]
    leaves += [(torch.randn(many * (i + 1), d) * 0.5).to(dtype) for i in range(n)]

    def run(f=token_mix):
        given = [x.clone().requires_grad_() for x in leaves]
        with rebuilt.loop(f is token_mix):
            sources, outs = [given[0].tanh()], []
            for W in given[1:]:
                sums = f(tuple(sources), (sources[-1] @ W.mT).unflatten(-1, (many, -1)))
                outs.append(sums[-1])
                used = sums[: max(1, many - 1)]
                sources.append(sum((k + 1) * h / many for k, h in enumerate(used)).sin())
        return given, sources, outs

    return run


PAIR = token_mix, reference.token_mix


@pytest.mark.parametrize("many", [1, 3])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("inputs", [slice(None), slice(0, 1), slice(2, 4)], ids=["all", "x", "two mixes"])
def test_any_backward_pass(use, inputs, many, mixes):
    """Partial, repeated and interrupted passes, expanded gradients, losses on sources and on single sums."""
    close(*both(network(many), *PAIR, use, inputs), 1e-12)
    assert mixes
    assert set(mixes) <= {many, 1, many - 1}


@needs_kernel("token_mix")
@pytest.mark.parametrize(
    "use",
    [u for name, u in USES.items() if name != "reads alone"],
    ids=[n for n in USES if n != "reads alone"],
)
@pytest.mark.parametrize("inputs", [slice(None), slice(2, 4)], ids=["all", "two mixes"])
def test_sources_that_gather_for_others(use, inputs, monkeypatch):
    """The kernel sums up for several sources at once, in whole passes, partial ones and those after them."""
    made, init = [], Ahead.__init__
    monkeypatch.setattr(Ahead, "__init__", lambda self, part: (made.append(part), init(self, part))[1])
    run = network(2, n=11, dtype=torch.float32)
    found, wide = both(run, *PAIR, use, inputs)[0], both(network(2, n=11), *PAIR, use, inputs)[1]
    close(found, wide, 1e-5)
    assert len(made) > 3


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float64", "float32"])
@pytest.mark.parametrize("many", [2, 4, 5])
@pytest.mark.parametrize("lead", [(0, 4), (1,), (2, 3)], ids=str)
def test_sizes_and_dtypes(lead, many, dtype, mixes):
    close(
        *both(network(many, lead=lead, dtype=dtype), *PAIR, USES["extra losses on sources"], slice(None)),
        BOUNDS[dtype],
    )
    assert mixes


def test_bfloat16_in_the_loop(mixes):
    """Gradients are kept in bfloat16, as autograd would, and no sum is worse than by mixes outside of the loop."""
    run, found = network(dtype=torch.bfloat16), []
    for f in (token_mix, lambda *args: token_mix(*args), reference.token_mix):
        given, sources, _ = run(f)
        found.append([g.float() for g in torch.autograd.grad(sources[-1].square().sum(), given)])
    assert len(mixes) == 5
    for pulled, apart, plain in zip(*found, strict=True):
        assert error(pulled, plain) <= 2 * error(apart, plain) + 2**-7


def test_hooks_on_sources_and_their_gradients(mixes):
    agree_with_hooks(network(), *PAIR, lambda sources, outs: sources[-1].sum() + outs[2].sum())
    assert mixes


def test_an_interrupted_pass_leaves_nothing_to_the_next():
    agree_after_an_interrupted_pass(network(), *PAIR)


def test_a_source_that_is_seen_twice_in_any_order(mixes):
    torch.manual_seed(2)
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (3, 2, 3)))
    found = []
    for f in (token_mix, reference.token_mix):
        with rebuilt.loop(f is token_mix):
            a = x.sin()
            b, c = f((a, x * 2, a), w)
            loss = f((c, a, b), w.cos())[0] + f((a, c), w[..., 1:].detach())[1]
        found.append(torch.autograd.grad(loss.square().sum(), (x, w)))
    close(*found, 1e-12)
    assert sorted(mixes) == [1, 1, 2]


def test_what_is_not_defined_says_so():
    for loop in (True, False):
        x, w = torch.randn(2, 3, requires_grad=True), torch.randn(2, 2, 1, requires_grad=True)
        with rebuilt.loop(loop):
            y = x.sin()
            loss = sum(token_mix((y,), w)).sum()
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


def test_what_falls_back(mixes):
    """Sources without a gradient, of two dtypes or not side by side in memory, which would be kept as copies."""
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(3, 2, 2, requires_grad=True)
    half = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    odd = torch.randn(3, 12, requires_grad=True)
    for other in (torch.randn(3, 6), half, odd[:, ::2], odd[:, 6:]):
        with rebuilt.loop(True):
            found = torch.autograd.grad(token_mix((x, other), w)[1].sum(), (x, w))
        close(found, torch.autograd.grad(reference.token_mix((x, other), w)[1].sum(), (x, w)), 1e-6)
    assert mixes == []


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float64, "auto"),
        pytest.param(torch.float32, "auto", marks=pytest.mark.full),
        pytest.param(torch.float32, "plain", marks=pytest.mark.full),
    ],
    ids=["float64", "float32", "float32-plain"],
)
@pytest.mark.parametrize("depth", DYNAMIC)
def test_a_step(depth, dtype, backend, pushed, monkeypatch, mixes):
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    agree_in_a_step(depth, dtype, pushed, mixes, 5 if depth.startswith("lime") else 3)


def test_checkpointed_blocks_differentiate_by_themselves(mixes):
    m, x = model("muddformer", torch.float64), tokens(2, 7)
    m.checkpointing = True
    m.train()
    found = torch.autograd.grad(m.loss(x, x), list(m.parameters()))
    assert mixes == []
    m.checkpointing = False
    close(found, torch.autograd.grad(m.loss(x, x), list(m.parameters())), 1e-12)
    assert mixes == [1, 4, 4]
