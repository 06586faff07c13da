"""Which function replays which family."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from twoaxis.verify.golden.case import Case

Runner = Callable[[Case], None]
_RUNNERS: dict[str, Runner] = {}


def golden(*families: str) -> Callable[[Runner], Runner]:
    """Decorator: this function replays the cases of these families."""

    def add(runner: Runner) -> Runner:
        _RUNNERS.update(dict.fromkeys(families, runner))
        return runner

    return add


def runners() -> dict[str, Runner]:
    """Every runner, by family: those of all files beside this one."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"twoaxis.verify.golden.{module.name}")
    return _RUNNERS
