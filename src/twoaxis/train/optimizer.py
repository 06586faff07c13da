"""The optimiser: parameter groups from the model's rules, and a state that follows names.

A group is (kind, decay, lr_scale). Every parameter is in exactly one. With `optimizer="muon"` the decayed
matrices of cores go to torch's Muon, its update scaled to AdamW's size (arXiv 2502.16982) so that both
share one learning rate. A fused matrix (q, k, v; gate and up) is orthogonalised as one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.errors import InputError
from twoaxis.train.config import TrainConfig
from twoaxis.train.muon import SharedMuon, Shares
from twoaxis.train.one_pass import in_one_pass
from twoaxis.train.precision import widen
from twoaxis.types import ParamRule

CORE = re.compile(r"blocks\.\d+\.cores\.")
FACTS: dict[type, set[str]] = {  # what torch keeps for a parameter
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Muon: {"momentum_buffer"},
    SharedMuon: {"momentum_buffer"},
}
TINY = 1e-6  # what torch adds to a norm
WRONG = "which does not fit; resume with the model and optimizer that the run was started with"


class Optimizer:
    """AdamW, and Muon beside it if asked for, over named parameters.

    shares: where these are parts of others. rounded: weights in bfloat16 that follow them (`Master.rounded`).
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        rules: dict[str, ParamRule],
        cfg: TrainConfig,
        shares: Shares | None = None,
        rounded: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.named = named
        self.rounded = {named[name]: weight for name, weight in (rounded or {}).items()}
        groups: dict[tuple[str, bool, float], list[str]] = {}
        for name, parameter in named.items():
            groups.setdefault(group_of(name, parameter, rules[name], cfg.optimizer), []).append(name)
        self.groups = groups
        self.parts: list[torch.optim.Optimizer] = []
        for kind in ("adamw", "muon"):
            mine = [
                {
                    "params": [named[n] for n in names],
                    "weight_decay": cfg.weight_decay if decay else 0.0,
                    "lr_scale": lr_scale,
                }
                for (of, decay, lr_scale), names in groups.items()
                if of == kind
            ]
            if mine and kind == "adamw":
                beta1, beta2 = cfg.betas
                self.parts.append(
                    torch.optim.AdamW(mine, lr=cfg.lr, betas=(beta1, beta2), eps=cfg.eps, fused=True)
                )
            elif mine:
                given: dict[str, Any] = {"lr": cfg.lr, "adjust_lr_fn": "match_rms_adamw"}
                names = {p: n for n, p in named.items()}
                self.parts.append(
                    torch.optim.Muon(mine, **given)
                    if shares is None
                    else SharedMuon(mine, names, shares, **given)
                )

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update every parameter that has a gradient, by that times `scale`, and what follows it in bfloat16.

        The learning rate is lr times the group's own scale.
        """
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_scale"]
            shorter = bool(self.rounded) or scale != 1  # than torch's, which is one pass by itself
            if not (shorter and in_one_pass(part, self.rounded, scale)):
                self._by_torch(part, scale)

    def _by_torch(self, part: torch.optim.Optimizer, scale: float) -> None:
        parameters = [p for group in part.param_groups for p in group["params"]]
        follow = [(self.rounded[p], p) for p in parameters if p in self.rounded]
        for weight, parameter in follow:
            widen(weight, parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        if scale != 1 and grads:
            torch._foreach_mul_(grads, scale)
        part.step()
        for weight, parameter in follow:
            weight.copy_(parameter)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the state as "parameter name/fact"."""
        return {
            f"{name}/{fact}": value
            for name, parameter in self.named.items()
            for part in self.parts
            for fact, value in part.state.get(parameter, {}).items()
        }

    def load_state(self, saved: dict[str, Tensor]) -> None:
        """Take up a state by name, its very tensors; a name, fact or shape that does not fit raises InputError."""
        own = {p: part for part in self.parts for group in part.param_groups for p in group["params"]}
        for key, value in saved.items():
            name, _, fact = key.rpartition("/")
            parameter = self.named.get(name)
            if parameter is None or value.shape != (() if fact == "step" else parameter.shape):
                raise InputError(f"the saved optimiser state has {key!r} {tuple(value.shape)}, {WRONG}")
            own[parameter].state[parameter][fact] = value.to(parameter.device)
        for name, parameter in self.named.items():
            facts = set(own[parameter].state.get(parameter, {}))
            if facts and facts != FACTS[type(own[parameter])]:
                raise InputError(f"the saved optimiser state of {name!r} has {sorted(facts)}, {WRONG}")


def group_of(name: str, parameter: Tensor, rule: ParamRule, optimizer: str) -> tuple[str, bool, float]:
    """The group of a parameter: (adamw or muon, whether it decays, the factor on its learning rate)."""
    muon = optimizer == "muon" and rule.decay and parameter.ndim == 2 and CORE.match(name) is not None
    return ("muon" if muon else "adamw", rule.decay, rule.lr_scale)


def clip_factor(norm: float, largest: float) -> float:
    """What gradients of this norm are multiplied by so that it is at most `largest` (0: leave them).

    As in torch's clipping, 0 where the norm is infinite and NaN where it is no number.
    """
    return min(largest / (norm + TINY), 1.0) if largest > 0 else 1.0
