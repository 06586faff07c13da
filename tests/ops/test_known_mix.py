"""Mixes by weights that the loop knows: every gradient equals that of mixes that are differentiated by themselves."""

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
from twoaxis.ops import choice, mix, mix_sums, rebuilt, reference
from twoaxis.ops.known_mix import softmaxed, weights_of
from twoaxis.ops.native import mix as native
from twoaxis.ops.owed import Sums

METHODS = {  # mixes by known weights of three blocks
    "denseformer": 3,
    "denseformer(period=2, dilation=2)": 1,
    "denseformer(window_blocks=2)": 3,
    "elc_bert": 2,
    "elc_bert(variant='weighted_output', normalize='none')": 4,
    "elc_bert(variant='normalized')": 2,
    "vertical_attention": 2,
    "vertical_attention(block_residual=True, source_norm='none')": 2,
}


@pytest.fixture
def mixes(monkeypatch):
    """The places of the known mixes that ran backward."""
    seen, init = [], mix_sums.Mixed.__init__

    def noting(self, *args):
        init(self, *args)
        seen.append(self.place)

    monkeypatch.setattr(mix_sums.Mixed, "__init__", noting)
    return seen


def network(known=5, n=5, lead=(3, 4), d=6, dtype=torch.float64, soft=True):
    """Leaves x, weights or logits; f(mix) -> leaves, sources, mixes: every source is a function of the last mix."""
    torch.manual_seed(1)
    leaves = [torch.randn(*lead, d, dtype=dtype), *(torch.randn(i + 1, dtype=dtype) for i in range(n))]

    def run(f=mix):
        given = [x.clone().requires_grad_() for x in leaves]
        with rebuilt.loop(f is mix, weights=lambda: [(w, soft) for w in given[1 : known + 1]]):
            sources, outs = [given[0].tanh()], []
            for w in given[1:]:
                outs.append(f(tuple(sources), softmaxed(w) if soft else w))
                sources.append((outs[-1] * (1 + w[0])).sin())
        return given, sources, outs

    return run


PAIR = mix, reference.mix


@pytest.mark.parametrize("soft", [True, False], ids=["softmax", "free"])
@pytest.mark.parametrize("known", [5, 3], ids=["all known", "three of five"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("inputs", [slice(None), slice(0, 1), slice(2, 4)], ids=["all", "x", "two mixes"])
def test_any_backward_pass(use, inputs, known, soft, mixes):
    """Partial, repeated and interrupted passes, expanded gradients, losses on sources."""
    close(*both(network(known, soft=soft), *PAIR, use, inputs), 1e-12)
    assert mixes
    assert set(mixes) <= {0, 1, 3, 6, 10}


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
def test_a_step(depth, dtype, backend, pushed, monkeypatch, mixes):
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    agree_in_a_step(depth, dtype, pushed, mixes, METHODS[depth])


def test_hooks_on_sources_and_their_gradients(mixes):
    agree_with_hooks(network(), *PAIR)
    assert mixes


def test_one_weight_for_two_mixes_and_sources_seen_twice_or_in_another_order(mixes):
    torch.manual_seed(2)
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((3, 6), (2,)))
    found = []
    for f in (mix, reference.mix):
        with rebuilt.loop(f is mix, weights=lambda: [(w, False)]):
            a = x.sin()
            b = f((x * 2, a), w).cos()
            c = f((b, a), w) + f((a, a), w) + f((a, b), w.detach())
        found.append(torch.autograd.grad(c.square().sum(), (x, w)))
    close(*found, 1e-12)
    assert mixes == [0] * 3


def test_an_interrupted_pass_leaves_nothing_to_the_next():
    """The first pass asks for a source alone, so that the weights' node does not run."""
    agree_after_an_interrupted_pass(network(), *PAIR)


def test_what_is_not_defined_says_so():
    _, sources, _ = network()()
    sources[-1].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        sources[-1].sum().backward()
    given, sources, _ = network()()
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(sources[-1].sum(), given[0], create_graph=True)
    for changed in (lambda given, sources: sources[1], lambda given, sources: given[3]):
        given, sources, _ = network(soft=False)()
        with torch.no_grad():
            changed(given, sources).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sources[-1].sum().backward()


def test_shapes_that_do_not_fit_are_refused_as_anywhere():
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(2, requires_grad=True)
    for sources in ((), (x,), (x, x[:2]), (x.sum(), x.sum())):
        with rebuilt.loop(True, weights=lambda: [(w, False)]), pytest.raises(InputError):
            mix(sources, w)


def test_what_falls_back(mixes):
    """Weights nobody named, frozen or by feature, sources without a gradient or of two dtypes."""
    x, w, by_feature = (torch.randn(s, requires_grad=True) for s in ((3, 6), (2,), (2, 6)))
    other, fixed = torch.randn(2, requires_grad=True), torch.randn(3, 6)
    half = torch.randn(3, 6, dtype=torch.bfloat16, requires_grad=True)
    cases = (
        ((x, x), other, w),
        ((x, x), w.detach(), w.detach()),
        ((x, x), by_feature, by_feature),
        ((x, fixed), w, w),
        ((x, half), w, w),
    )
    for sources, weights, known in cases:
        with rebuilt.loop(True, weights=lambda known=known: [(known, False)]):
            found = torch.autograd.grad(mix(sources, weights).sum(), x)
        close(found, torch.autograd.grad(reference.mix(sources, weights).sum(), x), 1e-6)
    assert mixes == []


def test_a_model_under_fsdp_names_none():
    made = model("denseformer", torch.float32)
    assert len(weights_of(made)) == 3
    made.blocks[0].unshard = lambda: None  # what FSDP gives to a module
    assert weights_of(made) == []


def test_checkpointed_blocks_and_recomputed_models_differentiate_by_themselves(pushed, mixes):
    m, x = model("denseformer", torch.float64), tokens(2, 7)
    m.checkpointing = True
    m.train()
    found = torch.autograd.grad(m.loss(x, x), list(m.parameters()))
    assert mixes == []
    m.checkpointing = False
    close(found, torch.autograd.grad(m.loss(x, x), list(m.parameters())), 1e-12)
    assert len(mixes) == 3


@needs_kernel("mix")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_equals_the_plain_sums(dtype):
    """Odd widths, few tokens, every way to group mixes."""
    library, eps = choice.library("mix"), torch.finfo(dtype).eps / 2 + 1e-5
    for N, d, S in ((1, 24, 1), (33, 33, 2), (129, 344, 5), (2, 3, 7), (19, 16, 11)):
        xs, w = [torch.randn(N, d).to(dtype) for _ in range(S)], torch.randn(S)
        out = mix_sums.mixed(w.double(), [x.double() for x in xs])
        assert error(native.mixed(library, w, xs), out) <= eps
        sums = Sums(4 * S)
        left = [
            (mix_sums.Mixed(sums, 3 * s, torch.randn(s + 1), torch.randn(N, d).to(dtype)), s)
            for s in range(S)
        ]
        wide = [(mix_sums.Mixed(sums, m.place, m.weights.double(), m.g.double()), i) for m, i in left]
        total, along = native.gathered(library, xs[0], left)
        exact = mix_sums.gathered(xs[0].double(), wide)
        assert error(total, exact[0]) <= eps
        assert error(along, exact[1]) <= 1e-5
        for a, b in zip(mix_sums.gathered(xs[0], left), exact, strict=True):
            assert error(a, b) <= eps
