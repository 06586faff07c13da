"""Hyper-Connections against their equation, their identities, and the standard Transformer they start as."""

import copy
from typing import Any

import pytest
import torch
from points import CTX, connection, model, perturb
from torch import Tensor, nn

from twoaxis.depth import build

SPECS = [
    "hyper_connections",
    "hyper_connections(dynamic=False)",
    "hyper_connections(streams=3, tanh=False)",
    "hyper_connections(streams=1)",
    "hyper_connections(streams=2, norm='rms')",
]


def by_the_paper(c: Any, H: Tensor, core: Any) -> tuple[Tensor, Tensor]:
    """Sublayer input and new streams, token by token and stream by stream, in the paper's words."""
    cfg, n, d = c.cfg, c.cfg.streams, H.shape[-1]
    A_m0, A_r0, B0 = c.static[:, 0], c.static[:, 1:-1], c.static[:, -1]
    h0, new = torch.empty_like(H[..., 0, :]), torch.empty_like(H)
    for at in [(b, t) for b in range(H.shape[0]) for t in range(H.shape[1])]:
        A_m, A_r, B = A_m0.clone(), A_r0.clone(), B0.clone()
        for s in range(n if cfg.dynamic else 0):
            x = H[at][s]
            if cfg.norm == "rms":
                x = d**0.5 * x / x.norm() * (1 + c.gain)
            else:
                x = (x - x.mean()) / (x.var(unbiased=False) + c.layout.norm_eps).sqrt()
            squash = torch.tanh if cfg.tanh else lambda z: z
            A_m[s] = A_m[s] + c.s_alpha * squash(x @ c.dynamic[:, 0])
            A_r[s] = A_r[s] + c.s_alpha * squash(x @ c.dynamic[:, 1:-1])
            B[s] = B[s] + c.s_beta * squash(x @ c.dynamic[:, -1])
        h0[at] = sum(A_m[s] * H[at][s] for s in range(n))
        o = core(c.norm(h0[at]))
        for t in range(n):
            new[at][t] = sum(A_r[s, t] * H[at][s] for s in range(n)) + B[t] * o
    return h0, new


@pytest.mark.parametrize("spec", SPECS)
def test_equals_the_papers_sums(spec: str) -> None:
    torch.manual_seed(0)
    c = connection(spec, width=5)
    H = torch.randn(2, 3, c.cfg.streams, 5, dtype=torch.float64)
    W = torch.randn(5, 5, dtype=torch.float64)
    with torch.no_grad():
        reads, carry = c.read(H, CTX)
        new = c.write(H, carry, reads.x @ W, CTX)
        h0, expected = by_the_paper(c, H, lambda x: x @ W)
        torch.testing.assert_close(reads.x, c.norm(h0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(new, expected, rtol=1e-12, atol=1e-12)


def test_cyclic_shift_moves_the_streams() -> None:
    """Pitfall: n=3 streams of distinct constants, a cyclic shift, branch output 0 -> the shifted streams."""
    c = connection("hyper_connections(streams=3, dynamic=False)", width=4)
    shift = torch.zeros(3, 3, dtype=torch.float64)
    for old in range(3):
        shift[old, (old + 1) % 3] = 1  # old stream s becomes new stream s + 1
    with torch.no_grad():
        c.static[:, 1:-1] = shift
    H = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)[None, None, :, None].expand(2, 1, 3, 4)
    new = c(H, lambda reads, ctx: torch.zeros_like(reads.x), CTX)
    assert new[0, 0, :, 0].tolist() == [5.0, 1.0, 2.0]
    assert torch.equal(new, H.roll(1, 2))


@pytest.mark.parametrize("spec", SPECS)
def test_starts_as_the_standard_transformer(spec: str) -> None:
    """Every stream is the standard stream of the same weights, exactly; the read-out is n times it."""
    ours, plain = model(spec, n_blocks=3).double(), model("additive", n_blocks=3).double()
    weights = {k: v for k, v in ours.state_dict().items() if k in plain.state_dict()}
    plain.load_state_dict(weights)
    tokens = torch.randint(17, (2, 9))
    logits, states = ours(tokens, return_states=True)
    expected, expected_states = plain(tokens, return_states=True)
    for depth in range(4):
        for stream in states[f"block.{depth}"].unbind(2):
            torch.testing.assert_close(stream, expected_states[f"block.{depth}"], rtol=1e-13, atol=1e-15)
    n = ours.cfg.depth_config().streams
    start = ours.cfg.depth_config().standard_start()
    assert start == ("exact" if n == 1 else "up to eps")
    x = n * expected_states["block.3"]
    torch.testing.assert_close(states["final"], plain.stream.norm(x), rtol=1e-12, atol=1e-12)
    if n == 1:
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    else:
        assert (logits - expected).abs().max() < 0.05 * expected.std()


def test_reads_stream_k_mod_n_and_writes_all() -> None:
    _, blocks = build("hyper_connections(streams=3)", 8, [["attention", "mlp"]] * 2)
    for k, c in enumerate(c for block in blocks for c in block):
        assert c.static[:, 0].tolist() == [float(s == k % 3) for s in range(3)]
        assert torch.equal(c.static[:, 1:-1], torch.eye(3))
        assert c.static[:, -1].tolist() == [1.0] * 3


def test_parallel_pairs_of_the_paper() -> None:
    """n=2, the odd and even matrices: two sublayers in parallel, sum_i (f_i(s) + s) with s = H_1 + H_2."""
    _, ((odd, even),) = build("hyper_connections(streams=2, dynamic=False)", 6, [["attention", "mlp"]])
    odd.norm = even.norm = nn.Identity()
    odd.double(), even.double()
    with torch.no_grad():  # [A_m | A_r | B] of [[0, B], [A_m, A_r]]
        odd.static.copy_(torch.tensor([[1.0, 1, 1, 1], [1.0, 1, 1, 0]]))
        even.static.copy_(torch.tensor([[0.0, 1, 0, 0], [1.0, 0, 1, 1]]))
    H = torch.randn(1, 2, 2, 6, dtype=torch.float64)
    W = torch.randn(2, 6, 6, dtype=torch.float64)
    f = [lambda reads, ctx, i=i: torch.tanh(reads.x @ W[i]) for i in range(2)]
    out = even(odd(H, f[0], CTX), f[1], CTX).sum(2)
    s = H.sum(2)
    torch.testing.assert_close(out, torch.tanh(s @ W[0]) + torch.tanh(s @ W[1]) + 2 * s)


def test_sequential_matrix_of_the_paper() -> None:
    """n=2: [[0, 1, 1], [1, 1, 0], [0, 0, 1]] is the pre-norm residual in each stream's own history."""
    c = connection("hyper_connections(streams=2, dynamic=False)", width=6)
    c.norm = nn.Identity()
    with torch.no_grad():
        c.static.copy_(torch.tensor([[1.0, 1, 0, 1], [0.0, 0, 1, 1]]))
    x = torch.randn(1, 2, 6, dtype=torch.float64)
    out = c(torch.stack((x, x), 2), lambda reads, ctx: reads.x.sin(), CTX)
    torch.testing.assert_close(out, torch.stack((x + x.sin(),) * 2, 2))


@pytest.mark.parametrize("spec", ["hyper_connections", "hyper_connections(dynamic=False)"])
def test_permuting_the_streams_changes_nothing(spec: str) -> None:
    torch.manual_seed(1)
    c = connection(spec, width=5)
    order = torch.tensor([2, 0, 3, 1])
    other = copy.deepcopy(c)
    with torch.no_grad():  # rows by stream; the columns of A_r (and of its dynamic part) by stream too
        columns = torch.cat((torch.tensor([0]), 1 + order, torch.tensor([5])))
        other.static.copy_(c.static[order][:, columns])
        if c.cfg.dynamic:
            other.dynamic.copy_(c.dynamic[:, columns])
    H = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    core = lambda reads, ctx: reads.x.sin()  # noqa: E731
    torch.testing.assert_close(other(H[:, :, order], core, CTX), c(H, core, CTX)[:, :, order])


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_changes_the_output(spec: str, n_blocks: int) -> None:
    """Pitfall: L = 1, 2, 3: no parameter is without gradient after one step at a generic point."""
    m = model(spec, n_blocks).double()
    perturb(m)
    tokens = torch.randint(17, (2, 6))
    m.loss(tokens, tokens.roll(1, 1)).backward()
    assert [name for name, p in m.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_gates_stay_in_float32_under_autocast(state_dtype: str) -> None:
    """Weights and mixing do not round to bfloat16; the state keeps its own dtype."""
    torch.manual_seed(0)
    _, ((c,),) = build("hyper_connections", 16, [["mlp"]], state_dtype=state_dtype)
    perturb(c)
    H = torch.randn(2, 3, 4, 16).to(getattr(torch, state_dtype))
    y = torch.randn(2, 3, 16).bfloat16()
    exact = copy.deepcopy(c).double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reads, carry = c.read(H, CTX)
        out = c.write(H, carry, y, CTX)
    with torch.no_grad():
        carry64 = exact.read(H.double(), CTX)[1]
        out64 = exact.write(H.double(), carry64, y.double(), CTX)
    assert (out.dtype, reads.x.dtype) == (H.dtype, H.dtype)
    for ours, theirs in zip(carry, carry64, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if state_dtype == "float32" else 2**-8
    torch.testing.assert_close(out.double(), out64, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", SPECS)
def test_state_is_not_changed_in_place(spec: str) -> None:
    c = connection(spec, width=5)
    H = torch.randn(2, 3, c.cfg.streams, 5, dtype=torch.float64)
    before = H.clone()
    c(H, lambda reads, ctx: reads.x, CTX)
    assert torch.equal(H, before)


@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck(spec: str) -> None:
    torch.manual_seed(2)
    c = connection(spec, width=3)
    H = torch.randn(1, 2, c.cfg.streams, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda H, *_: c(H, lambda reads, ctx: reads.x.sin(), CTX), (H, *c.parameters())
    )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no_rows", "no_tokens"])
def test_empty_batches(spec: str, shape: tuple[int, int]) -> None:
    """Pitfall: B=0 or T=0 -> empty outputs of the right shape and dtype."""
    logits = model(spec)(torch.zeros(shape, dtype=torch.int64))
    assert logits.shape == (*shape, 17)
    assert logits.dtype == torch.float32
