"""What `operators.py` compares of an optimiser's update: norm, clipping, AdamW, and rounding to the model's weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from operator_cases import Case, Run, copying
from torch import nn

from twoaxis import ParamRule
from twoaxis.ops import choice
from twoaxis.train import TrainConfig
from twoaxis.train.optimizer import Optimizer
from twoaxis.train.precision import Master

D, BLOCKS = 512, 8
BLOCK = [(3 * D, D), (D, D), (2730, D), (D, 1365), (D,), (D,)]  # as a plain block has them
BYTES = {
    torch.bfloat16: 30,
    torch.float32: 32,
}  # of a number: gradient twice, 12 read and written, a rounded copy


def run_of(backend: str, dtype: torch.dtype, grads: list[torch.Tensor], scale: float) -> Run:
    """A whole update of parameters of its own, from gradients where backward leaves them."""
    model = nn.ParameterList([nn.Parameter(torch.randn(g.shape)) for g in grads])
    master = Master(model, "bf16_master" if dtype == torch.bfloat16 else "float32")  # type: ignore[arg-type]
    rules = {n: ParamRule(decay=p.ndim > 1) for n, p in master.named.items()}
    optimizer = Optimizer(master.named, rules, TrainConfig(), None, master.rounded)

    def run() -> None:
        master.zero_grad()
        for p, grad in zip(model, grads, strict=True):
            p.grad = grad
        with choice.requesting(backend):
            master.norm()
            optimizer.step(1e-4, scale)

    return run


def fused(grads: list[torch.Tensor]) -> Run:
    """torch's fused step alone, on float32 parameters, from float32 gradients that are there."""
    parameters = [nn.Parameter(torch.randn(g.shape)) for g in grads]
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad.float()
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step


def updates(dtype: torch.dtype) -> Iterator[Case]:
    """One update of a model's parameters, with and without a norm that needs clipping."""
    shapes = [(8192, D), *BLOCK * BLOCKS]
    numbers = sum(torch.Size(s).numel() for s in shapes)
    for what, scale in {"clipped": 0.9, "not clipped": 1.0}.items():
        grads = [0.1 * torch.randn(s).to(dtype) for s in shapes]
        runs = {who: run_of(who, dtype, grads, scale) for who in ("native", "plain")}
        runs["torch's fused step alone"] = fused(grads)
        limit = copying(BYTES[dtype] / 4, torch.empty(numbers))
        yield f"AdamW of {numbers / 1e6:.1f} M numbers, norm and rounding with it, {what}", runs | limit
