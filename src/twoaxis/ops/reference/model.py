"""What every model is made of, as plainly as can be: norms, the gated product, rotation, the loss of tokens."""

import torch
from torch import Tensor

from ..precision import compute_dtype, full_precision


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension without gain: x / sqrt(mean(x^2) + eps), same shape and dtype."""
    with full_precision(x):
        v = x.to(compute_dtype(x))
        return (v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6, *, dtype: torch.dtype | None = None) -> Tensor:
    """gain x / sqrt(mean(x^2) + eps), rounded once to `dtype` (None: x's)."""
    with full_precision(x):
        v = x.to(compute_dtype(x))
        y = gain.to(v.dtype) * v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y.to(x.dtype if dtype is None else dtype)


def add_rms_norm(
    x: Tensor, branch: Tensor, gain: Tensor, eps: float = 1e-6, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch in x's dtype, and `rms_norm` of it."""
    total = x + branch.to(x.dtype)
    return total, rms_norm(total, gain, eps, dtype=dtype)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up of x (..., 2 h), the gate's numbers first."""
    with full_precision(x):
        gate, up = x.to(compute_dtype(x)).chunk(2, -1)
        return (gate * gate.sigmoid() * up).to(x.dtype)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """sum_i log sum_v e^(z_iv) - z_i,t(i) over targets that are not -100."""
    z, t = logits.to(compute_dtype(logits)), targets.clamp(min=0).unsqueeze(-1)
    losses = z.logsumexp(-1) - z.gather(-1, t).squeeze(-1)
    return losses.masked_fill(targets == -100, 0.0).sum()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x_i + j x_{i+R}) e^(j angle) for i < R, of x (B, T, H, D) and angles (..., T, 1, R); the rest as it is."""
    with full_precision(x):
        (a, b), rest = x.to(cos.dtype)[..., : 2 * cos.shape[-1]].chunk(2, -1), x[..., 2 * cos.shape[-1] :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)
