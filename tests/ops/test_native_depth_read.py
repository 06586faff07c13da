"""The native depth read against the reference in float64, and when it is used at all."""

import pytest
import torch
from agreement import error, results, rounded_once
from native_cases import needs_kernel
from read_cases import LEAD, call, case, randn
from torch.utils.flop_counter import FlopCounterMode

from twoaxis.ops import depth_read, reference

pytestmark = needs_kernel("depth_read")
NAMES = ["static", "token gain", "static gain normed bias", "token raw scale", "token gain scale normed bias"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def native(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")


def compare(name, n, d, lead, dtype, **rest):
    leaves, options = case(name, n, d, lead)
    options |= rest
    inputs = [x.to(dtype) for x in (*leaves.values(), *(randn(*lead, d) for _ in range(n)))]
    found = results(call(depth_read, leaves, options, n), inputs)
    exact = results(call(reference.depth_read, leaves, options, n), [x.double() for x in inputs])
    rounded_once(found, exact)


@DTYPES
@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name, normalize, dtype):
    """Odd widths, tokens that fill no vector, and every way to group sources (1, 2, 4 at a time)."""
    for d, T, n in ((24, 33, 1), (33, 1, 7), (344, 129, 3), (1, 33, 2), (16, 5, 4)):
        compare(name, n, d, (T,), dtype, normalize=normalize)


@DTYPES
@pytest.mark.parametrize("lead", [(), (0, 4), (2, 0), (3, 2, 5)], ids=str)
def test_any_leading_shape(lead, dtype):
    """Pitfall: B=0, T=4; B=2, T=0 -> empty outputs of the right shape and dtype."""
    for name in ("static gain normed bias", "token gain"):
        compare(name, 3, 24, lead, dtype)


def test_any_layout_of_sources_and_gradients(counting):
    """Pitfall: transposed, strided, expanded and sliced views -> equal to contiguous copies."""
    library = counting("depth_read")
    stack = randn(4, 5, 2, 12, dtype=torch.float32)
    sources = [
        stack[0].transpose(0, 1)[..., ::2],
        stack[1].transpose(0, 1)[..., 3:9],
        stack[2, 0, 0, :6].expand(2, 5, 6),
        stack[3].permute(1, 0, 2)[..., :6],
    ]
    leaves = [x.detach().requires_grad_() for x in (randn(6, dtype=torch.float32), *sources)]
    for cotangent in (torch.ones(1).expand(2, 5, 6), torch.randn(5, 2, 6).transpose(0, 1)):
        grads = [
            torch.autograd.grad(read(leaves[0], leaves[1:]), leaves, cotangent)
            for read in (depth_read, reference.depth_read)
        ]
        assert all(error(a, b) < 1e-6 for a, b in zip(*grads, strict=True))
    assert library.calls == ["depth_read_forward", "depth_read_backward"] * 2


def test_biases_by_token_and_hidden_sources():
    """Pitfall: a row whose mask is all False -> exactly 0, gradients 0, no NaN; other rows unchanged."""
    hide = torch.zeros(2, 5)
    hide[0, 1] = -torch.inf
    inputs = [
        randn(*shape, dtype=torch.float32) for shape in ((6,), LEAD, (), (2, 5, 6), (2, 5, 6), (2, 5, 6))
    ]
    for normalize in ("softmax", "sigmoid", "none"):

        def f(query, one, two, *sources, read=depth_read, normalize=normalize):
            return read(query, sources, bias=(one + hide, two + hide, hide), normalize=normalize)

        found, wanted = results(f, inputs), results(lambda *x: f(*x, read=reference.depth_read), inputs)
        assert all(error(a, b) < 1e-6 for a, b in zip(found, wanted, strict=True))
        assert all((x[0, 1] == 0).all() for x in (found[0], *found[4:]))


def test_weights_are_returned_and_differentiable():
    def weights(read, query, *sources):
        return read(query, sources, return_weights=True)[1]

    inputs = [randn(6, dtype=torch.float32), *(randn(*LEAD, 6, dtype=torch.float32) for _ in range(5))]
    found = results(lambda *x: weights(depth_read, *x), inputs)
    wanted = results(lambda *x: weights(reference.depth_read, *x), inputs)
    assert found[0].shape == (2, 5, 5)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-6


def test_only_what_is_asked_for_gets_gradients_again_and_again():
    """Pitfall: only the listed states need grad, not the direct input; here twice through one graph."""
    query, fixed, wanted = (randn(*s, dtype=torch.float32) for s in ((6,), (2, 5, 6), (2, 5, 6)))
    wanted.requires_grad_()
    out = depth_read(query, (fixed, wanted, fixed))
    grads = [torch.autograd.grad(out.sum(), wanted, retain_graph=True)[0] for _ in range(2)]
    (plain,) = torch.autograd.grad(reference.depth_read(query, (fixed, wanted, fixed)).sum(), wanted)
    assert grads[0].equal(grads[1])
    assert error(grads[0], plain) < 1e-6
    with pytest.raises(RuntimeError, match=r"twoaxis\.ops\.reference"):
        torch.autograd.grad(out.sum(), wanted, create_graph=True)


@DTYPES
def test_threads_change_rounding_at_most(dtype):
    leaves, rest = case("static gain normed", 5, 24, (3, 50))
    inputs = [x.to(dtype) for x in (*leaves.values(), *(randn(3, 50, 24) for _ in range(5)))]
    f = call(depth_read, leaves, rest, 5)
    one = results(f, inputs)
    torch.set_num_threads(2)
    try:
        two = results(f, inputs)
    finally:
        torch.set_num_threads(1)
    assert one[0].equal(two[0])
    assert all(error(a, b) <= 1e-6 + torch.finfo(dtype).eps / 2 for a, b in zip(one, two, strict=True))


def test_not_a_number_stays_what_it_is_in_bfloat16(counting):
    library = counting("depth_read")
    sources = [randn(2, 3, 6, dtype=torch.bfloat16) for _ in range(3)]
    sources[1][0, 0, 0], sources[2][1, 2, 3] = torch.nan, torch.inf
    found = depth_read(randn(6, dtype=torch.bfloat16) * 0, sources, key_norm_eps=None, normalize="sigmoid")
    exact = sum(x.double() for x in sources) / 2
    assert library.calls == ["depth_read_forward"]
    assert found[0, 0, 0].isnan()
    assert found[1, 0].equal(exact.bfloat16()[1, 0])


@DTYPES
def test_scores_that_are_no_number_are_not_hidden_sources(dtype):
    sources, query = [randn(2, 3, 6).to(dtype) for _ in range(9)], randn(2, 3, 6)
    query[0, 1, 2] = torch.nan
    found = depth_read(query.to(dtype), sources, return_weights=True)
    assert all(x[0, 1].isnan().all() and x.isnan().any(-1).sum() == 1 for x in found)
    assert depth_read(query[0, 1].to(dtype), sources).isnan().all()
    first = [torch.full((2, 3), torch.nan)] * 4 + [torch.zeros(2, 3)] * 5  # a group of sources by itself
    assert depth_read(randn(6).to(dtype), sources, bias=first).isnan().all()


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_what_the_kernel_does_not_cover_is_plain(backend, counting, monkeypatch):
    library = counting("depth_read")
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    single, double = (tuple(randn(4, 6, dtype=t) for _ in range(2)) for t in (torch.float32, torch.float64))
    query = randn(6, dtype=torch.float32)
    depth_read(query, single, heads=2)
    depth_read(query, double)
    depth_read(query, (single[0], single[1].bfloat16()))
    depth_read(query.to("meta"), tuple(x.to("meta") for x in single))
    with FlopCounterMode(display=False):  # observers see none of a kernel's work
        depth_read(query, single)
    assert library.calls == []
    depth_read(query, single)
    assert library.calls == ["depth_read_forward"]


@torch.no_grad()
def test_a_decoding_step_is_left_to_its_own_path(counting):
    library = counting("depth_read")
    query = randn(6, dtype=torch.float32)
    depth_read(query, (randn(2, 1, 6, dtype=torch.float32),) * 3)
    assert library.calls == []
    depth_read(query, (randn(2, 9000, 6, dtype=torch.float32),) * 3)
    assert library.calls == ["depth_read_forward"]


def test_plain_leaves_the_kernel_alone(counting, monkeypatch):
    library = counting("depth_read")
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    depth_read(randn(6, dtype=torch.float32), (randn(4, 6, dtype=torch.float32),))
    assert library.calls == []


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does
def test_one_graph_under_compile(counting):
    """Pitfall: fullgraph works; a kernel would break the graph, so it is left to eager calls."""
    library = counting("depth_read")
    torch._dynamo.reset()
    x = randn(4, 6, dtype=torch.float32)
    found = torch.compile(lambda x: depth_read(x[0], (x, 2 * x)), backend="eager", fullgraph=True)(x)
    assert library.calls == []
    assert error(found, depth_read(x[0], (x, 2 * x))) < 1e-6
