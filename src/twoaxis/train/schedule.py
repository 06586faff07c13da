"""The learning rate over a run, as a factor on its largest value."""

from __future__ import annotations

import math

from twoaxis.train.config import TrainConfig


def lr_factor(cfg: TrainConfig, step: int) -> float:
    """The factor at `step`, counted from 1 to `cfg.steps`.

    Linear warm-up reaches 1 at `warmup_steps`. After it, with r = min_lr_ratio:
    constant stays at 1; cosine falls over all remaining steps, r + (1 - r) (1 + cos(pi t)) / 2 with t from
    0 to 1 (arXiv 1608.03983); wsd stays at 1 and falls linearly to r over the last `decay_fraction` of all
    steps (arXiv 2404.06395).
    """
    if step <= cfg.warmup_steps:
        return step / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    low = cfg.min_lr_ratio
    if cfg.schedule == "cosine":
        t = (step - cfg.warmup_steps) / max(cfg.steps - cfg.warmup_steps, 1)
        return low + (1 - low) * (1 + math.cos(math.pi * t)) / 2
    left = (cfg.steps - step) / max(cfg.decay_fraction * cfg.steps, 1)  # of the decay, in 0..1 inside it
    return low + (1 - low) * min(left, 1.0)
