"""RMSNorm with a gain, the one norm that the models use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoaxis.ops.norm import add_rms_norm, rms_norm
from twoaxis.ops.precision import autocast_dtype


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467).

    The result has x's dtype; the mean runs in at least float32. for_products: only matrix products read the result,
    so under autocast it comes in the dtype that these would round it to.
    """

    def __init__(self, width: int, eps: float = 1e-6, *, for_products: bool = False) -> None:
        super().__init__()
        self.eps, self.for_products = eps, for_products
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, dtype=self._dtype(x))

    def after_adding(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """x + branch in x's dtype, and the norm of it."""
        return add_rms_norm(x, branch, self.weight, self.eps, dtype=self._dtype(x))

    def _dtype(self, x: Tensor) -> torch.dtype:
        rounded = autocast_dtype(x) if self.for_products and x.dtype == torch.float32 else None
        return x.dtype if rounded is None else rounded

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
