"""A decoding step's reads by their kernel against the reference in float64, and when they are used at all."""

import pytest
import torch
from agreement import error
from native_cases import needs_kernel
from torch.utils.flop_counter import FlopCounterMode

from twoaxis import InputError, ops
from twoaxis.norm import RMSNorm
from twoaxis.ops import reference, reference_steps
from twoaxis.ops.native import few_tokens as native
from twoaxis.ops.token_read import Options

pytestmark = needs_kernel("few_tokens")
SIZES = [(1, (1, 1), 1), (33, (1, 1), 5), (344, (8, 1), 4), (7, (2, 3), 13), (24, (), 2)]  # d, lead, n
LEADS = pytest.mark.parametrize("lead", [(1, 1), (8, 1), (2, 3)], ids=str)
SIZED = pytest.mark.parametrize(("d", "lead", "n"), SIZES, ids=str)


@pytest.fixture(autouse=True)
def step(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    with torch.no_grad():
        yield


def sources(d, lead, n, strided=False):
    return tuple(torch.randn(*lead, d, 2)[..., 0] if strided else torch.randn(*lead, d) for _ in range(n))


def double(x):
    return (
        tuple(map(double, x))
        if isinstance(x, tuple | list)
        else x.double()
        if isinstance(x, torch.Tensor)
        else x
    )


def agree(found, wanted):
    assert all(x.dtype == torch.float32 for x in found)
    assert max(error(a, b) for a, b in zip(found, wanted, strict=True)) < 1e-5


def normalising(d):
    norm = RMSNorm(d, 1e-5)
    norm.weight.copy_(torch.randn(d))
    return norm


@SIZED
@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "by token"])
def test_depth_read(static, strided, d, lead, n, counting):
    library, xs = counting("few_tokens"), sources(d, lead, n, strided)
    query = torch.randn(d) if static else torch.randn(*lead, d)
    cases = [
        {},
        {"key_norm_eps": None, "scale": 0.3, "normalize": "sigmoid"},
        {"key_gain": torch.randn(d), "output_eps": 1e-6, "output_gain": torch.randn(d)},
        {"normalize": "none", "output_eps": 1e-5},
        {"bias": torch.randn(n), "key_norm_eps": None},
        {"bias": [torch.randn(lead) for _ in range(n)]},
    ]
    for options in cases:
        found = ops.depth_read(query, xs, **options, return_weights=True)
        exact = {name: double(value) for name, value in options.items()}
        wanted = reference.depth_read(double(query), double(xs), **exact, return_weights=True)
        agree(found, wanted)
        assert ops.depth_read(query, xs, **options).equal(found[0])
    assert library.calls == ["few_tokens"] * 2 * len(cases)


@SIZED
def test_depth_read_beside_a_stream(d, lead, n):
    xs, skip, query, gain = sources(d, lead, n), torch.randn(*lead, d), torch.randn(d), torch.randn(d)
    found = native.scored(Options(1e-6, 1.0, "softmax", 1, 1e-5, False), query, None, gain, None, xs, skip)
    h = double(skip) + reference.depth_read(double(query), double(xs))
    agree(found[:1], [reference.rms(h, 1e-5) * gain])


@pytest.mark.parametrize("heads", [1, 3])
@LEADS
def test_rows_read(lead, heads):
    """Keys and values side by side, each head a row, as depth_attention keeps them."""
    rows, query = sources(7 + 12, (*lead, heads), 3), torch.randn(*lead, heads, 7)
    keys, values = zip(*(row.split((7, 12), -1) for row in double(rows)), strict=True)
    options = {"key_norm_eps": None, "scale": 0.4, "return_weights": True}
    _, weights = reference.depth_read(query.double(), keys, **options)
    wanted = reference.token_mix(values, weights.unsqueeze(-2))
    agree([native.rows_read(query, rows, 7, 0.4)], wanted)
    agree([native.rows_read(query.transpose(0, -2).contiguous().transpose(0, -2), rows, 7, 0.4)], wanted)


def test_norms_of_another_kind_are_left_to_the_plain_way():
    xs, weights, gate, norms = (
        sources(6, (2, 1), 3),
        torch.ones(1, 3),
        torch.ones(1, 6),
        [torch.nn.Identity()],
    )
    assert native.gated(xs, weights, gate, None, norms) is None
    norms = [RMSNorm(6, 1e-5), RMSNorm(6, 1e-6)]
    assert native.gated(xs, weights.expand(2, 3), gate.expand(2, 6), None, norms) is None


def test_hidden_sources():
    xs = sources(6, (2, 1), 3)
    hide = torch.tensor([[0.0], [-torch.inf]])
    for normalize in ("softmax", "sigmoid", "none"):
        for bias in ([hide] * 3, [hide, torch.zeros(2, 1), hide]):
            options = {"bias": bias, "normalize": normalize}
            found = ops.depth_read(torch.randn(6), xs, **options)
            assert found.isfinite().all()
            assert (found[1] == 0).all() == (bias[1] is hide)


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
def test_scores_that_are_no_number_are_not_hidden_sources(normalize):
    query = torch.randn(2, 1, 6)
    query[1, 0, 2] = torch.nan
    found = ops.depth_read(query, sources(6, (2, 1), 3), normalize=normalize, return_weights=True)
    assert all(x.isfinite().flatten(1).all(1).tolist() == [True, False] for x in found)


@pytest.mark.parametrize("finish", ["none", "softmax", "relu"])
def test_made_weights_that_are_no_number_stay_so(finish):
    xs, up = sources(6, (2, 1), 3), torch.randn(6, 6)
    up[1] = torch.nan
    reads, _ = native.made(xs, xs[0], up, torch.zeros(2, 3), eps=1e-6, finish=finish)
    assert reads[0].isnan().all()
    assert reads[1].isfinite().all()


@SIZED
@pytest.mark.parametrize("finish", ["none", "softmax", "relu"])
@pytest.mark.parametrize("gelu", [None, "erf", "tanh"])
def test_made_mix(gelu, finish, d, lead, n):
    xs, R, h = sources(d, lead, n), 3, 20
    x, gain = torch.randn(*lead, d), torch.randn(d)
    down = None if gelu is None else torch.randn(h, d)
    up, bias = torch.randn(R * n, h if gelu else d) / 5, torch.randn(R, n)
    options = {"eps": 1e-6, "finish": finish, "gain": gain, "gelu": gelu or "erf"}
    norms = (normalising(d), None, normalising(d))
    reads, normed = native.made(xs, x, up, bias, down=down, norms=norms, **options)
    exact = double((xs, x, up, bias))
    wanted = reference_steps.made_mix(*exact, down=None if down is None else double(down), **options)
    agree(reads, wanted)
    agree(normed[::2], [norm.double()(z) for norm, z in zip(norms[::2], wanted[::2], strict=True)])


@SIZED
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("by_feature", [False, True])
def test_gated_mix(by_feature, eps, d, lead, n, counting):
    library, xs, gate = counting("few_tokens"), sources(d, lead, n, strided=True), torch.randn(3, d)
    weights = torch.randn(3, n, *([d] if by_feature else []))
    found = ops.gated_mix(xs, weights, gate, norm_eps=eps)
    wanted = reference.gated_mix(double(xs), double(weights), double(gate), norm_eps=eps)
    agree(found, wanted)
    norm = normalising(d)
    _, normed = native.gated(xs, weights, gate, eps, [None, norm, None])
    agree(normed[1:2], [norm.double()(wanted[1])])
    assert library.calls == ["few_tokens"] * 2


def test_what_is_no_step_of_float32_is_plain(counting, monkeypatch):
    library, xs, query = counting("few_tokens"), sources(6, (2, 1), 3), torch.randn(6)
    ops.depth_read(query, double(xs))
    ops.depth_read(query, tuple(x.bfloat16() for x in xs))
    ops.depth_read(query.double(), xs)
    ops.depth_read(query, (xs[0], xs[1].double()))
    ops.depth_read(query, xs, heads=2)
    ops.depth_read(query, sources(6, (0, 1), 3))
    ops.depth_read(query.to("meta"), tuple(x.to("meta") for x in xs))
    with torch.enable_grad():
        ops.depth_read(query, xs)
    with torch.autocast("cpu", torch.bfloat16):
        ops.depth_read(query, xs)
    with FlopCounterMode(display=False):  # observers see none of a kernel's work
        ops.depth_read(query, xs)
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    ops.depth_read(query, xs)
    assert library.calls == []


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does
def test_a_compiled_step_is_plain(counting):
    library, x = counting("few_tokens"), torch.randn(2, 1, 6)
    torch._dynamo.reset()
    found = torch.compile(lambda x: ops.depth_read(x[0, 0], (x, 2 * x)), backend="eager", fullgraph=True)(x)
    assert library.calls == []
    assert error(found, ops.depth_read(x[0, 0], (x, 2 * x))) < 1e-6


@pytest.mark.parametrize(
    ("query", "options"),
    [(5, {}), (6, {"key_gain": torch.ones(5)}), (6, {"normalize": "relu"}), (6, {"output_gain": torch.ones(6)}),
     (6, {"heads": True}), (6, {"bias": torch.ones(2)})],
    ids=str,
)  # fmt: skip
def test_what_is_refused_is_still_refused(query, options):
    with pytest.raises(InputError):
        ops.depth_read(torch.ones(query), sources(6, (2, 1), 3), **options)
    with pytest.raises(InputError, match="one shape"):
        ops.depth_read(torch.ones(6), (torch.ones(6), torch.ones(2, 6)))
