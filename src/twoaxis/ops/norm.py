"""RMSNorm without gain."""

from torch import Tensor
from torch.nn.functional import rms_norm

from .precision import compute_dtype


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, in at least float32; same shape and dtype."""
    return rms_norm(x.to(compute_dtype(x)), x.shape[-1:], eps=eps).to(x.dtype)
