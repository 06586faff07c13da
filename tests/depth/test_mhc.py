"""mHC against its equations, its identities, the standard Transformer it starts as, and the trap to avoid."""

import copy
import itertools
from typing import Any

import pytest
import torch
from points import CTX, model, perturb
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import twoaxis
from twoaxis import InputError, Shape, ops
from twoaxis.depth import MHC, build

SPECS = [
    "mhc",
    "mhc(streams=3, iterations=2, last='columns', eps=0.01)",
    "mhc(streams=3, mixing='permutations')",
    "mhc(streams=2, dynamic=False, gates='softmax', write_scale=2.0)",
    "mhc(streams=1, readout='head')",
    "mhc(readout='head', start='random')",
]


def middle(spec: str, width: int = 5, state_dtype: str = "float32") -> Any:
    """A connection between two others, so that it mixes; in float64 at a random point."""
    _, ((_, made, _),) = build(spec, width, [["mlp"] * 3], state_dtype=state_dtype)
    return perturb(made).double()


def streams(c: Any, *lead: int) -> Tensor:
    return torch.randn(*lead, c.cfg.streams, c.layout.d_model, dtype=torch.float64)


def by_the_paper(c: Any, X: Tensor, core: Any) -> tuple[Tensor, Tensor]:
    """Sublayer input and new streams of one token (n, d), in the paper's words."""
    cfg, n = c.cfg, c.cfg.streams
    z = X.flatten() / (X.square().mean() + c.layout.norm_eps).sqrt()
    m, logits = c.coefficients, c.coefficients.bias.clone()
    for group, columns in enumerate([range(n), range(n, 2 * n), range(2 * n, len(logits))]):
        for j in columns if cfg.dynamic else ():
            logits[j] = m.scale[group] * (z @ m.phi[:, j]) + logits[j]
    P, Q = (g.softmax(0) if cfg.gates == "softmax" else g.sigmoid() for g in (logits[:n], logits[n : 2 * n]))
    P, Q, R = P + cfg.eps, cfg.write_scale * Q, logits[2 * n :]
    if cfg.mixing == "permutations":
        H, weights = torch.zeros(n, n, dtype=X.dtype), R.softmax(0)
        for w, order in zip(weights, itertools.permutations(range(n)), strict=True):
            for i, j in enumerate(order):
                H[i, j] += w
    elif n == 1:
        H = torch.ones(1, 1, dtype=X.dtype)
    else:
        H = ops.reference.sinkhorn(R.view(n, n), cfg.iterations, last=cfg.last, eps=cfg.eps)
    h = sum(P[s] * X[s] for s in range(n))
    o = core(c.norm(h))
    return h, torch.stack([sum(H[t, s] * X[s] for s in range(n)) + Q[t] * o for t in range(n)])


@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_papers_sums(spec: str) -> None:
    torch.manual_seed(0)
    c, W = middle(spec), torch.randn(5, 5, dtype=torch.float64)
    X = streams(c, 2, 3)
    with torch.no_grad():
        reads, carry = c.read(X, CTX)
        new = c.write(X, carry, reads.x @ W, CTX)
        for at in itertools.product(range(2), range(3)):
            h, expected = by_the_paper(c, X[at], lambda x: x @ W)
            torch.testing.assert_close(reads.x[at], c.norm(h), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(new[at], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixing", ["sinkhorn", "permutations"])
def test_cyclic_shift_moves_the_streams(mixing: str) -> None:
    # pitfalls, depth states: n=3 streams with distinct constant values, mixing matrix a cyclic shift, branch
    # output 0 -> outgoing streams are the shifted ones; the shift is no symmetric matrix, its transpose fails
    c = middle(f"mhc(streams=3, dynamic=False, mixing={mixing!r})", width=4)
    logits = torch.full((3, 3), -1e4, dtype=torch.float64)
    for old in range(3):
        logits[(old + 1) % 3, old] = 0  # old stream s becomes new stream s + 1
    if mixing == "permutations":  # H[t, p(t)] = 1 with p = (2, 0, 1)
        logits = torch.full((6,), -1e4, dtype=torch.float64)
        logits[list(itertools.permutations(range(3))).index((2, 0, 1))] = 0
    with torch.no_grad():
        c.coefficients.bias[6:] = logits.flatten()
    X = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)[None, None, :, None].expand(2, 1, 3, 4)
    new = c(X, lambda reads, ctx: torch.zeros_like(reads.x), CTX)
    torch.testing.assert_close(new, X.roll(1, 2), rtol=0, atol=1e-12)


def test_doubly_stochastic_mixing_keeps_the_mean_and_equal_streams() -> None:
    c = middle("mhc(mixing='permutations')")
    zero = lambda reads, ctx: torch.zeros_like(reads.x)  # noqa: E731
    X = streams(c, 2, 3)
    torch.testing.assert_close(c(X, zero, CTX).mean(2), X.mean(2), rtol=0, atol=1e-14)
    equal = X[:, :, :1].expand_as(X)
    torch.testing.assert_close(c(equal, zero, CTX), equal, rtol=0, atol=1e-14)
    rows, columns = (middle(f"mhc(iterations=1, last={last!r})") for last in ("rows", "columns"))
    torch.testing.assert_close(rows(equal, zero, CTX), equal, rtol=0, atol=1e-14)  # row sums are exact
    torch.testing.assert_close(columns(X, zero, CTX).mean(2), X.mean(2), rtol=0, atol=1e-14)
    assert (rows(X, zero, CTX).mean(2) - X.mean(2)).abs().max() > 1e-4
    assert (columns(equal, zero, CTX) - equal).abs().max() > 1e-4


def test_mixing_error_is_reported() -> None:
    # pitfalls, depth states: the last-normalised axis sums to 1 and the other axis's error is reported
    c = middle("mhc(iterations=2)")
    with torch.no_grad():
        c.coefficients.bias[8:] = 3 * torch.randn(16, dtype=torch.float64)
    rows, columns = ops.sinkhorn_error(c.gates(streams(c, 2, 3))[2])
    assert rows < 1e-12 < 1e-3 < columns


def test_both_kinds_of_epsilon_have_a_place_of_their_own() -> None:
    X = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    outputs = []
    for norm_eps, eps in ((0.3, 0.05), (0.05, 0.3), (0.3, 0.3)):
        torch.manual_seed(0)
        _, ((_, c, _),) = build(f"mhc(eps={eps})", 5, [["mlp"] * 3], norm_eps=norm_eps)
        outputs.append(perturb(c.double())(X, lambda reads, ctx: reads.x, CTX))
    for a, b in itertools.combinations(outputs, 2):
        assert (a - b).abs().max() > 1e-4


@pytest.mark.parametrize("spec", ["mhc", "mhc(readout='head')", "mhc(mixing='permutations', streams=3)"])
def test_starts_as_the_standard_transformer(spec: str) -> None:
    """Every stream is the standard stream of the same weights up to the norm's eps."""
    ours, plain = (model(s, n_blocks=3, norm_eps=0.0).double() for s in (spec, "additive"))
    plain.load_state_dict({k: v for k, v in ours.state_dict().items() if k in plain.state_dict()})
    tokens = torch.randint(17, (2, 9))
    logits, states = ours(tokens, return_states=True)
    expected, expected_states = plain(tokens, return_states=True)
    for stream in states["block.3"].unbind(2):
        torch.testing.assert_close(stream, expected_states["block.3"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-12)


def spread_after_training(m: Any) -> float:
    """How far the streams are apart at the end, relative to their size, after 20 steps of Adam."""
    tokens = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(m.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        m.loss(tokens, tokens.roll(1, 1)).backward()
        optimizer.step()
    X = m(tokens, return_states=True)[1]["block.2"].detach()
    return float((X - X.mean(2, keepdim=True)).std() / X.std())


@pytest.mark.parametrize("spec", ["mhc", "mhc(start='random')", "mhc(mixing='permutations', streams=3)"])
def test_streams_separate(spec: str) -> None:
    assert spread_after_training(model(spec).double()) > 1e-3  # 0.01 to 0.09


def test_the_symmetric_point_is_a_trap() -> None:
    """phi = 0 and b = 0: all streams get the same gradients for ever; neither start is this point."""
    m = model("mhc").double()
    for block in m.blocks:
        for c in block.connections:
            torch.nn.init.zeros_(c.coefficients.bias)
    assert spread_after_training(m) < 1e-10


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ("streams=3", [[3, 3, 0], [3, 3, 9], [3, 3, 9], [3, 3, 0]]),
        ("streams=3, readout='head'", [[3, 3, 0], [3, 3, 9], [3, 3, 9], [3, 3, 9]]),
        ("streams=3, gates='softmax'", [[0, 3, 0], [3, 3, 9], [3, 3, 9], [3, 0, 0]]),
        ("streams=1", [[1, 1, 0]] * 4),
        ("streams=1, gates='softmax'", [[0, 0, 0]] * 4),
    ],
)
def test_coefficients_that_could_change_nothing_are_not_there(options: str, sizes: list[list[int]]) -> None:
    _, blocks = build(f"mhc({options})", 6, [["attention", "mlp"]] * 2)
    assert [c.coefficients.sizes for block in blocks for c in block] == sizes


@pytest.mark.parametrize("spec", ["mhc", "mhc(dynamic=False)"])
def test_permuting_the_streams_changes_nothing(spec: str) -> None:
    torch.manual_seed(1)
    c, order = middle(spec), torch.tensor([2, 0, 3, 1])
    rows = (5 * order[:, None] + torch.arange(5)).flatten()
    columns = torch.cat((order, 4 + order, (8 + 4 * order[:, None] + order).flatten()))
    other = copy.deepcopy(c)
    with torch.no_grad():
        other.coefficients.bias.copy_(c.coefficients.bias[columns])
        if c.cfg.dynamic:
            other.coefficients.phi.copy_(c.coefficients.phi[rows][:, columns])
    X = streams(c, 2, 3)
    core = lambda reads, ctx: reads.x.sin()  # noqa: E731
    torch.testing.assert_close(other(X[:, :, order], core, CTX), c(X, core, CTX)[:, :, order])


@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck(spec: str) -> None:
    torch.manual_seed(2)
    c = middle(spec, width=3)
    X = streams(c, 1, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda X, *_: c(X, lambda reads, ctx: reads.x.sin(), CTX), (X, *c.parameters())
    )


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_coefficients_stay_in_float32_under_autocast(state_dtype: str) -> None:
    torch.manual_seed(0)
    exact = middle("mhc", 16, state_dtype)
    c = copy.deepcopy(exact).float()
    X, y = torch.randn(2, 3, 4, 16).to(getattr(torch, state_dtype)), torch.randn(2, 3, 16).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reads, carry = c.read(X, CTX)
        out = c.write(X, carry, y, CTX)
    with torch.no_grad():
        carry64 = exact.read(X.double(), CTX)[1]
        out64 = exact.write(X.double(), carry64, y.double(), CTX)
    assert (out.dtype, reads.x.dtype) == (X.dtype, X.dtype)
    for ours, theirs in zip(carry, carry64, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if state_dtype == "float32" else 2**-8
    torch.testing.assert_close(out.double(), out64, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", SPECS)
def test_cost_equals_what_is_built(spec: str) -> None:
    stream, (cs,) = build(spec, 8, [["attention", "mlp", "mlp"]])
    cfg, X = twoaxis.parse_spec("depth", spec), torch.randn(2, 3, 8, requires_grad=True)
    cost = cfg.cost(Shape(layout=cs[0].layout, batch_size=2, seq_len=3))
    assert cost.parameters == sum(p.numel() for part in (stream, *cs) for p in part.parameters())
    with FlopCounterMode(display=False) as forward:
        state = stream.open(X, CTX)
        for c in cs:
            state = c(state, lambda reads, ctx: reads.x, CTX)
        out = stream.close(state, CTX)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert cost.boundary_bytes == {"full": state.numel() * state.element_size()}
    assert forward.get_total_flops() == cost.flops_forward
    assert backward.get_total_flops() == cost.flops_backward


def test_parameters_at_the_papers_size() -> None:
    """245,760 numbers in phi of one sublayer at d = 2560, n = 4; 24 in b and 3 scales."""
    layout = twoaxis.Layout(d_model=2560, blocks=(("mlp", "mlp", "mlp"),))
    cost = MHC.Config().cost(Shape(layout=layout, batch_size=1, seq_len=1))
    ends = 2 * (10240 * 8 + 8 + 2)  # the first and the last sublayer do not mix
    assert cost.parameters == 245_760 + 24 + 3 + ends + 4 * 2560


@pytest.mark.parametrize(
    "bad",
    ["streams=0", "streams=6, mixing='permutations'", "iterations=-1", "eps=-1e-6", "write_scale=0",
     "mixing='permutations', iterations=3", "mixing='permutations', last='columns'", "mixing='orthogonal'",
     "dynamic=False, start='random'", "start='zero'", "tau=0.05"],
)  # fmt: skip
def test_refuses_bad_options(bad: str) -> None:
    with pytest.raises(InputError) as error:
        twoaxis.parse_spec("depth", f"mhc({bad})")
    assert "\n" not in str(error.value)
