"""Evaluation mode for a while, and every module's own mode again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module has the mode it had before."""
    with evaluating_modules(model.modules()):
        yield


@contextmanager
def evaluating_modules(modules: Iterator[nn.Module] | list[nn.Module]) -> Iterator[None]:
    """As `evaluating`, for modules listed before: one pass over a model's tree serves many steps."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
