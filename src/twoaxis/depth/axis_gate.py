"""The gate between a read along the sequence and a read along depth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AxisGate(nn.Module):
    """G = sigmoid(W_g [s; z] + b_g), (B, T, gates), the share of the sequence's read s; W_g and b_g start at zero."""

    def __init__(self, d: int, gates: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gates, 2 * d))
        self.bias = nn.Parameter(torch.zeros(gates))

    def forward(self, s: Tensor, z: Tensor) -> Tensor:
        """G from s and z (B, T, d), in their dtype; they are not put side by side."""
        of_s, of_z = self.weight.to(s.dtype).chunk(2, 1)
        return (F.linear(s, of_s, self.bias.to(s.dtype)) + F.linear(z, of_z)).sigmoid()
