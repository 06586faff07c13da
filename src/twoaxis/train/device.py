"""Where a run computes, and how many compiled graphs torch may keep for it."""

from __future__ import annotations

import torch

from twoaxis.errors import InputError


def allow_graphs(n_blocks: int) -> None:
    """Let torch keep a few graphs for each block of a compiled model (training, validation, a short row).

    Blocks that are alike share them, but a history is longer in each block, and beyond torch's limit of 8
    the other blocks would run uncompiled.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 4 * n_blocks)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, limits.recompile_limit)


def choose_device(name: str) -> torch.device:
    """The torch device that a configuration names; InputError if it is not there."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device {name!r} cannot be used ({str(error).splitlines()[0]}); try auto or cpu"
        ) from None
    return device
