"""What each row was given, and whether two rows were given the same.

A row may be called better than the baseline only if both saw as many tokens of the same data in the same
order under the same settings (learning rate included), and the named budget agrees within 1%:

    match parameters    the number of parameters
    match flops         FLOPs per token, forward and backward
    match width         both of them: equal widths alone name no budget
"""

from __future__ import annotations

from typing import Any

from twoaxis.cost import budget_of, cost, match_mlp
from twoaxis.errors import InputError
from twoaxis.study.grid import Match
from twoaxis.study.units import percent
from twoaxis.train import TrainConfig
from twoaxis.train.config import FREE

TOLERANCE = 0.01
SAID = {"parameters": "parameters", "flops_per_token": "FLOPs per token"}
NAMED = {
    "width": ("parameters", "flops_per_token"),
    "parameters": ("parameters",),
    "flops": ("flops_per_token",),
}
OFFERS = (("parameters", "parameters"), ("flops_per_token", "flops"))


def budgets(cfg: TrainConfig) -> dict[str, Any]:
    """The budgets of one run: counts from its configuration alone."""
    total = cost(cfg.model, cfg.batch_size, cfg.seq_len)
    return {
        "parameters": total.parameters,
        "flops_per_token": total.flops / (cfg.batch_size * cfg.seq_len),
        "tokens": cfg.steps * cfg.tokens_per_step,
        "lr": cfg.lr,
    }


def flat(cfg: TrainConfig) -> dict[str, Any]:
    """Every setting that changes what is computed, those of the model as "model.name"."""
    data = cfg.to_dict()
    model = data.pop("model")
    return {k: v for k, v in data.items() if k not in FREE} | {f"model.{k}": v for k, v in model.items()}


def differences(own: TrainConfig, base: TrainConfig) -> list[str]:
    """The settings besides the model and the seed in which two runs differ, as "lr=0.001 against 0.003"."""
    mine, other = flat(own), flat(base)
    return [
        f"{name}={mine[name]!r} against {other[name]!r}"
        for name in mine
        if mine[name] != other[name] and name != "seed" and not name.startswith("model.")
    ]


def unmatched(own: TrainConfig, base: TrainConfig, match: Match) -> str | None:
    """Why a row must not be ranked against the baseline, or None when the named budget is matched."""
    mine, other = budgets(own), budgets(base)
    apart = [
        f"{SAID[name]} {percent(mine[name] / other[name] - 1)}"
        for name in NAMED[match]
        if abs(mine[name] / other[name] - 1) > TOLERANCE
    ]
    reasons = [*apart, *differences(own, base)]
    return f"budgets are unmatched ({'; '.join(reasons)})" if reasons else None


def widened_baselines(own: TrainConfig, base: TrainConfig) -> list[str]:
    """Controls: the baseline with MLPs as wide as brings it to the row's parameters, and to its FLOPs."""
    mine, other = budgets(own), budgets(base)
    size = (base.batch_size, base.seq_len)
    controls = []
    for name, budget in OFFERS:
        if abs(mine[name] / other[name] - 1) > TOLERANCE:
            try:
                target = budget_of(own.model, budget, *size)  # type: ignore[arg-type]
                model = match_mlp(base.model, budget, target, *size)  # type: ignore[arg-type]
            except InputError:  # no MLP to widen, or narrower than one could be
                continue
            if all(isinstance(s, str) for s in model.sequence):
                block = ",".join(str(s) for s in model.sequence)
                controls.append(f'--depth "{model.depth}" --sequence "{block}" has its {SAID[name]}')
    return controls
