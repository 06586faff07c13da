"""The generators of Python, NumPy and torch: isolated for a run, their states as plain data and tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twoaxis.errors import InputError


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed every generator for a run; the caller's own states come back afterwards."""
    facts, tensors = random_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(facts, tensors)


def reseed(seed: int, step: int, rank: int) -> None:
    """From `step` on, numbers of its own for process `rank` of those that read rows of their own; 0 stays as it is."""
    if rank:
        drawn = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(drawn))


def random_state() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The states: Python's and NumPy's as plain data, torch's (the CPU's and each GPU's) as byte tensors."""
    version, words, gauss = random.getstate()
    numpy: dict[str, Any] = np.random.get_state(legacy=False)
    numpy = {**numpy, "state": {"key": numpy["state"]["key"].tolist(), "pos": int(numpy["state"]["pos"])}}
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return {"python": [version, list(words), gauss], "numpy": numpy}, tensors


def set_random_state(facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Take up what `random_state` returned; GPU states of GPUs that are not there are left out."""
    try:
        version, words, gauss = facts["python"]
        random.setstate((version, tuple(words), gauss))
        state = facts["numpy"]["state"]
        key = np.array(state["key"], dtype=np.uint32)
        np.random.set_state({**facts["numpy"], "state": {"key": key, "pos": state["pos"]}})
        torch.set_rng_state(tensors["torch"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"not the saved state of generators: {error!r}") from None
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
