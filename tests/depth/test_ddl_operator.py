"""The mathematics of the rewrite X' = (I - beta k k^T) X + beta k v^T, through the public connection."""

import pytest
import torch
from points import CTX, connection
from torch import Tensor


def apply(states: Tensor, h: Tensor, beta: float, v: Tensor | float = 0.0, eps: float = 1e-30) -> Tensor:
    """States (n, d) or (n, d, m), all rewritten along h (d,) by the public connection."""
    n, d = states.shape[:2]
    m = states.shape[2] if states.ndim == 3 else 1
    c = connection(f"ddl(value_dim={m}, key_eps={eps})", width=d)
    target = torch.as_tensor(v, dtype=states.dtype).expand(1, n, m)
    gate = torch.full((1, n, 1), beta, dtype=states.dtype)
    return c.write(states[None], (target, gate), h.expand(1, n, d), CTX)[0].detach()


def shortcut(h: Tensor, beta: float, eps: float = 1e-30) -> Tensor:
    """A = I - beta k k^T as a matrix (d, d)."""
    return apply(torch.eye(h.shape[0], dtype=h.dtype), h, beta, 0.0, eps).T


@pytest.mark.parametrize("eps", [1e-30, 0.8], ids=["unit_key", "short_key"])
@pytest.mark.parametrize("beta", [0.3, 1.0, 1.7, 2.0])
class TestShortcut:
    """The frozen operator: spectrum, determinant, norm, inverse."""

    @pytest.fixture
    def h(self) -> Tensor:
        return torch.randn(7, dtype=torch.float64)

    @staticmethod
    def rho(h: Tensor, eps: float) -> float:
        return float(h.square().sum() / (h.square().sum() + eps**2))

    def test_spectrum(self, h: Tensor, beta: float, eps: float) -> None:
        values, vectors = torch.linalg.eigh(shortcut(h, beta, eps))
        expected = torch.ones(7, dtype=torch.float64)
        expected[0] = 1 - beta * self.rho(h, eps)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-14)
        assert (vectors[:, 0] @ h).abs() / h.norm() > 1 - 1e-12  # the odd one out is along the key

    def test_determinant(self, h: Tensor, beta: float, eps: float) -> None:
        single = 1 - beta * self.rho(h, eps)
        assert torch.linalg.det(shortcut(h, beta, eps)).item() == pytest.approx(single, abs=1e-14)
        basis = torch.eye(7 * 3, dtype=torch.float64).reshape(-1, 7, 3)
        whole = apply(basis, h, beta, 0.0, eps).flatten(1)
        assert torch.linalg.det(whole).item() == pytest.approx(single**3, abs=1e-14)

    def test_never_expands(self, h: Tensor, beta: float, eps: float) -> None:
        product = shortcut(h, beta, eps) @ shortcut(torch.randn_like(h), 2 - beta / 2, eps)
        assert torch.linalg.matrix_norm(shortcut(h, beta, eps), 2) == pytest.approx(1, abs=1e-14)
        assert torch.linalg.matrix_norm(product, 2) <= 1 + 1e-14

    def test_error_contracts(self, h: Tensor, beta: float, eps: float) -> None:
        """k^T X' - v^T = (1 - beta rho)(k^T X - v^T), and its n-th power after n equal rewrites."""
        X, v = torch.randn(1, 7, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        k = h / (h.square().sum() + eps**2).sqrt()
        error = k @ X[0] - v
        for n in range(1, 4):
            X = apply(X, h, beta, v, eps)
            torch.testing.assert_close(
                k @ X[0] - v, (1 - beta * self.rho(h, eps)) ** n * error, rtol=0, atol=1e-13
            )

    def test_inverse(self, h: Tensor, beta: float, eps: float) -> None:
        left = 1 - beta * self.rho(h, eps)
        if abs(left) < 1e-12:
            assert torch.linalg.matrix_rank(shortcut(h, beta, eps)) == 6  # beta rho = 1 projects
            return
        k = h / (h.square().sum() + eps**2).sqrt()
        inverse = torch.eye(7, dtype=torch.float64) + beta / left * torch.outer(k, k)
        identity = torch.eye(7, dtype=torch.float64)
        torch.testing.assert_close(shortcut(h, beta, eps) @ inverse, identity, rtol=0, atol=1e-12)

    def test_changes_only_the_key_direction(self, h: Tensor, beta: float, eps: float) -> None:
        X, v = torch.randn(1, 7, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        change = (apply(X, h, beta, v, eps) - X)[0]
        assert torch.linalg.matrix_rank(change, rtol=1e-12) == 1
        across = torch.randn(7, dtype=torch.float64)
        across -= (across @ h) / (h @ h) * h
        torch.testing.assert_close(across @ change, torch.zeros(3).double(), rtol=0, atol=1e-13)
        rho = self.rho(h, eps)
        k = h / (h.square().sum() + eps**2).sqrt()
        size = beta * rho**0.5 * (v - k @ X[0]).norm()
        torch.testing.assert_close(change.norm(), size, rtol=1e-12, atol=1e-14)


def test_beta_1_lands_on_the_target() -> None:
    X, h, v = torch.randn(1, 5, 3).double(), torch.randn(5).double(), torch.randn(3).double()
    torch.testing.assert_close(h / h.norm() @ apply(X, h, 1.0, v)[0], v, rtol=1e-13, atol=1e-13)


def test_beta_2_is_a_reflection() -> None:
    A = shortcut(torch.randn(5).double(), 2.0)
    for square in (A @ A, A @ A.T):
        torch.testing.assert_close(square, torch.eye(5).double(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_no_overshoot_below_1(beta: float) -> None:
    """The read-out along k is a convex combination of the old one and the target."""
    x, h = torch.randn(1, 5).double(), torch.randn(5).double()
    k = h / h.norm()
    new = apply(x, h, beta, 3.0)[0] @ k
    torch.testing.assert_close(new, (1 - beta) * (x[0] @ k) + beta * 3.0, rtol=1e-13, atol=1e-13)


def test_depends_on_the_direction_only() -> None:
    X, h, v = torch.randn(2, 5, 3).double(), torch.randn(5).double(), torch.randn(3).double()
    torch.testing.assert_close(apply(X, 1e4 * h, 1.3, v), apply(X, h, 1.3, v), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(apply(X, -h, 1.3, -v), apply(X, h, 1.3, v), rtol=1e-13, atol=1e-13)


def test_no_gate_and_no_output_are_the_identity() -> None:
    X, h = torch.randn(2, 5, 3).double(), torch.randn(5).double()
    assert torch.equal(apply(X, h, 0.0, 2.0), X)
    assert torch.equal(apply(X, 0 * h, 1.5, 2.0, eps=1e-5), X)


def test_bridge_to_the_residual_sum() -> None:
    """beta = 1 and v = k^T x + sqrt(|h|^2 + eps^2) give x + h."""
    x, h, eps = torch.randn(1, 5).double(), torch.randn(5).double(), 0.3
    length = (h.square().sum() + eps**2).sqrt()
    v = (h / length) @ x[0] + length
    torch.testing.assert_close(apply(x, h, 1.0, v, eps), x + h, rtol=1e-13, atol=1e-13)
