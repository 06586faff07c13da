"""RMSNorm with a gain, the one norm that the models use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoaxis.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467).

    The result has x's dtype; the mean runs in at least float32.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
