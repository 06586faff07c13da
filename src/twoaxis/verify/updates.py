"""AdamW's update, as training makes it, against the paper's equations in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoaxis.ops.reference import adamw
from twoaxis.train.config import TrainConfig
from twoaxis.train.optimizer import Optimizer
from twoaxis.types import ParamRule

SHAPES = {"table": (33, 43), "gain": (129,), "scalar": ()}
LR, SCALE, STEPS = 1e-2, 0.37, 3


def update_error(dtype: torch.dtype) -> float:
    """Largest error of a weight after some updates by gradients of `dtype`, relative to max(1, largest weight).

    bfloat16: of float32 masters; infinite if a weight in bfloat16 is not its master rounded.
    """
    generator = torch.Generator().manual_seed(0)
    low = dtype == torch.bfloat16
    named = {n: _numbers(s, generator).to(torch.float32 if low else dtype) for n, s in SHAPES.items()}
    exact = {
        n: (w.double(), torch.zeros(w.shape).double(), torch.zeros(w.shape).double())
        for n, w in named.items()
    }
    masters = {n: nn.Parameter(w) for n, w in named.items()}
    rounded = {n: nn.Parameter(w.to(dtype)) for n, w in named.items()} if low else {}
    rules = {n: ParamRule(decay=len(s) > 1, lr_scale=1.0 + len(s)) for n, s in SHAPES.items()}
    cfg = TrainConfig(weight_decay=0.1)
    beta1, beta2 = cfg.betas
    optimizer = Optimizer(masters, rules, cfg, None, rounded)
    for step in range(1, STEPS + 1):
        for n, rule in rules.items():
            grad = _numbers(SHAPES[n], generator).to(dtype)
            (rounded if low else masters)[n].grad = grad
            theta, m, v = exact[n]
            decay = cfg.weight_decay if rule.decay else 0.0
            how = {"lr": LR * rule.lr_scale, "eps": cfg.eps, "decay": decay}
            exact[n] = adamw(theta, SCALE * grad.double(), m, v, step, betas=(beta1, beta2), **how)
        optimizer.step(LR, SCALE)
        for p in (*masters.values(), *rounded.values()):
            p.grad = None
    if not all(weight.equal(masters[n].to(dtype)) for n, weight in rounded.items()):
        return float("inf")
    errors = [_error(masters[n].detach(), theta) for n, (theta, _, _) in exact.items()]
    return max(errors)


def _numbers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1))
