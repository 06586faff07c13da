"""Deep Delta Learning: one sublayer against its equations, its gradients and its precision."""

from typing import Any

import pytest
import torch
from points import CTX, connection, model, perturb, state_of
from torch import Tensor

from twoaxis.depth import build

PAPER = "target_source='context', target_act='linear', target_bias=False"
SPECS = [
    "ddl",
    "ddl(value_dim=4)",
    "ddl(value_dim=2, embed_conv=False)",
    "ddl(value_dim=3, kernel=2, compressor='token')",
    "ddl(gate='mlp', gate_hidden=3, target_scale=2.5)",
    f"ddl(value_dim=3, {PAPER})",
    "ddl(target_const=1.7, write_only=True)",
    "ddl(value_dim=2, key_eps=0.7, beta0=0.5, write_only=True)",
]


def in_plain_words(c: Any, X: Tensor, core: Any) -> Tensor:
    """One token's new state (d, m) by the equations, from its state (d, m); channel compressors only."""
    cfg, d, m = c.cfg, *X.shape
    u = X[:, 0]
    if cfg.expanded:
        w, p, k = c.compress.weight, c.compress.read, cfg.taps
        left, u = (k - 1) // 2, torch.zeros(d, dtype=X.dtype)
        for j in range(m):  # the convolution's channel j, then the read vector
            for tap in range(k):
                if 0 <= j + tap - left < m:
                    u = u + p[j] * w[:, tap] * X[:, j + tap - left]
    context = u / (u.square().mean() + c.layout.norm_eps).sqrt() * c.norm.weight
    h = core(context)
    k = h / (h.square().sum() + cfg.key_eps**2).sqrt()
    inner = context if cfg.gate == "linear" else (c.gate_in.weight @ context).tanh()
    beta = 2 / (1 + (-(c.gate.weight[0] @ inner + c.gate.bias[0])).exp())
    if cfg.target_const is not None:
        v = torch.full((m,), cfg.target_const, dtype=X.dtype)
    else:
        v = c.target.weight @ (context if cfg.target_source == "context" else u)
        v = v + c.target.bias if cfg.target_bias else v
        v = cfg.target_scale / (1 + (-v).exp()) if cfg.target_act == "sigmoid" else v
    e = v if cfg.write_only else v - k @ X
    return X + beta * torch.outer(k, e)


@pytest.mark.parametrize("spec", [s for s in SPECS if "token" not in s])
def test_equals_the_equations(spec: str) -> None:
    """Code form and paper form (v = W_v c, no bias, no squashing), scalar and expanded, with every option."""
    torch.manual_seed(0)
    c = connection(spec)
    X, W = state_of(c, 2, 3), torch.randn(6, 6, dtype=torch.float64)
    with torch.no_grad():
        out = c(X, lambda reads, ctx: reads.x @ W, CTX)
        for at in [(b, t) for b in range(2) for t in range(3)]:
            expected = in_plain_words(c, X[at] if c.cfg.expanded else X[at][:, None], lambda x: x @ W)
            torch.testing.assert_close(out[at], expected.reshape(out[at].shape), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", ["ddl", "ddl(value_dim=3)", "ddl(value_dim=3, compressor='token')"])
def test_reads_and_gates_stay_in_float32_under_autocast(spec: str, state_dtype: str) -> None:
    torch.manual_seed(0)
    _, ((c,),) = build(spec, 16, [["mlp"]], state_dtype=state_dtype)
    exact = perturb(c).__class__.for_block(c.cfg, c.layout, 0)[0].double()
    exact.load_state_dict(c.state_dict())
    X = state_of(c, 2, 5).to(getattr(torch, state_dtype))
    y = torch.randn(2, 5, 16).bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        reads, control = c.read(X, CTX)
        out = c.write(X, control, y, CTX)
    with torch.no_grad():
        reads64, control64 = exact.read(X.double(), CTX)
        out64 = exact.write(X.double(), control64, y.double(), CTX)
    assert (out.dtype, reads.x.dtype) == (X.dtype, X.dtype)
    tolerance = 1e-5 if state_dtype == "float32" else 2**-5
    torch.testing.assert_close(reads.x.double(), reads64.x, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip((*control, out), (*control64, out64), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", SPECS)
def test_state_is_not_changed_in_place(spec: str) -> None:
    c = connection(spec)
    X = state_of(c, 2, 3)
    before = X.clone()
    c(X, lambda reads, ctx: reads.x, CTX)
    assert torch.equal(X, before)


@pytest.mark.parametrize("spec", SPECS)
def test_gradcheck(spec: str) -> None:
    c = connection(spec, width=3)
    X = state_of(c, 1, 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda X, *_: c(X, lambda reads, ctx: reads.x.sin() + 1, CTX),
        (X, *c.parameters()),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no_rows", "no_tokens"])
def test_empty_batches(spec: str, shape: tuple[int, int]) -> None:
    """Pitfall: B=0 or T=0 -> empty outputs of the right shape and dtype."""
    logits = model(spec)(torch.zeros(shape, dtype=torch.int64))
    assert logits.shape == (*shape, 17)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("n_blocks", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_changes_the_output(spec: str, n_blocks: int) -> None:
    """Pitfall: L = 1, 2, 3: no parameter is without gradient after one step at a generic point."""
    m = perturb(model(spec, n_blocks).double())
    tokens = torch.randint(17, (2, 6))
    m.loss(tokens, tokens.roll(1, 1)).backward()
    assert [name for name, p in m.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_full_jacobian_of_the_scalar_sublayer() -> None:
    """J = I - b k k^T + k (e db + b dv)^T + b (e I - k x^T)(I - k k^T)/|h| dh/dx at eps = 0."""
    c = connection("ddl(key_eps=1e-30)", width=5)
    W = torch.randn(5, 5, dtype=torch.float64)

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        reads, (v, beta) = c.read(x[None, None], CTX)
        h = (reads.x @ W).sin()
        return c.write(x[None, None], (v, beta), h, CTX)[0, 0], v[0, 0, 0], beta[0, 0, 0], h[0, 0]

    x = torch.randn(5, dtype=torch.float64)
    J, dv, dbeta, dh = torch.autograd.functional.jacobian(parts, x)
    _, v, beta, h = (p.detach() for p in parts(x))
    k, identity = h / h.norm(), torch.eye(5, dtype=torch.float64)
    e, across = v - k @ x, identity - torch.outer(k, k)
    expected = identity - beta * torch.outer(k, k) + torch.outer(k, e * dbeta + beta * dv)
    expected += beta * (e * identity - torch.outer(k, x)) @ across / h.norm() @ dh
    torch.testing.assert_close(J, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("spec", ["ddl", "ddl(value_dim=3)"])
def test_write_only_control_is_the_rewrite_without_erasing(spec: str) -> None:
    """X' = X + beta k v^T: what the rewrite does to a state that reads 0 along k."""
    c = connection(spec)
    X, h = state_of(c, 2, 3), torch.randn(2, 3, 6).double()
    v, beta = torch.randn(2, 3, c.cfg.value_dim).double(), torch.rand(2, 3, 1).double()
    control = connection(spec.rstrip(")") + ("(" if "(" not in spec else ", ") + "write_only=True)")
    written = control.write(X, (v, beta), h, CTX)
    torch.testing.assert_close(written - X, c.write(0 * X, (v, beta), h, CTX), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(written, c.write(X, (v, beta), h, CTX))
