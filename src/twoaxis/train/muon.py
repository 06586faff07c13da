"""Muon where a process has shares of matrices: the update is put together, orthogonalised whole, and cut again.

Momentum belongs to each number and stays in shares. One whole matrix at a time is on every process that has a share of
it, and each of them orthogonalises it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Shares(Protocol):
    """Where a process's shares of tensors lie, as a `Team` knows it."""

    def whole(self, name: str, share: Tensor) -> Tensor:
        """The tensor that the shares of all processes make, on each of them."""

    def share(self, name: str, whole: Tensor) -> Tensor:
        """This process's share of a whole tensor."""


class SharedMuon(torch.optim.Muon):
    """torch's Muon over shares, equal to it over whole matrices. names: of every parameter."""

    def __init__(
        self, groups: list[dict[str, Any]], names: dict[nn.Parameter, str], shares: Shares, **given: Any
    ) -> None:
        super().__init__(groups, **given)
        self.names, self.shares = names, shares

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient; all processes come here with the same ones."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Momentum in shares; then one step of torch's Muon, without momentum, from zero is the update."""
        grad, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        name = self.names[parameter]
        whole = self.shares.whole(name, update)
        moved = nn.Parameter(torch.zeros_like(whole))
        moved.grad = whole
        same = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([moved], weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(self.shares.share(name, moved.detach()))
