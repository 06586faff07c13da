"""AdamW's update in one pass over memory. Its state is that of `torch.optim.AdamW`; either goes on from the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from twoaxis.ops.native import adamw
from twoaxis.train.precision import gradient_of


def in_one_pass(
    part: torch.optim.Optimizer, rounded: Mapping[nn.Parameter, nn.Parameter], scale: float
) -> bool:
    """Do `part.step()` with gradients times `scale`, and round parameters into their bfloat16 weights.

    False, and nothing is done, for another optimiser and where the kernel is not for its tensors.
    """
    groups = part.param_groups
    lib = adamw.library([p for group in groups for p in group["params"]])
    if lib is None or type(part) is not torch.optim.AdamW:
        return False
    given = [
        (p, grad, part.state[p] or _begin(part.state[p], p), weight, group["lr"], group["weight_decay"])
        for group in groups
        for p in group["params"]
        if (grad := gradient_of(p, weight := rounded.get(p))) is not None
    ]
    if not given:
        return True
    counts = [state["step"] for _, _, state, *_ in given]
    parts = [
        adamw.Part(p, grad, state["exp_avg"], state["exp_avg_sq"], weight, int(count) + 1, lr, decay)
        for (p, grad, state, weight, lr, decay), count in zip(
            given, torch.stack(counts).tolist(), strict=True
        )
    ]
    done = adamw.update(lib, parts, groups[0]["betas"], groups[0]["eps"], scale)
    if done:
        torch._foreach_add_(counts, 1)
    return done


def _begin(state: dict[str, Tensor], p: nn.Parameter) -> dict[str, Tensor]:
    """A state as torch begins with it."""
    state["step"] = torch.zeros((), dtype=torch.float32)
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return state
