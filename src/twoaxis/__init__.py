"""twoaxis: how a Transformer carries information along depth and along the sequence.

Every name is loaded when it is first asked for, so that `twoaxis --help` does not wait for torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoaxis import depth, model, ops, parallel, sequence
    from twoaxis.cost import cost
    from twoaxis.errors import InputError, RunError
    from twoaxis.model import Decoder, ModelConfig, load, save
    from twoaxis.model.freeze import axis_shares, freeze_axes
    from twoaxis.model.generate import generate, generate_stream, generate_text
    from twoaxis.model.presets import presets
    from twoaxis.model.windows import depth_windows, expected_depth
    from twoaxis.spec import methods, parse_spec, register, unregister
    from twoaxis.study.compare import compare
    from twoaxis.train import TrainConfig, train
    from twoaxis.types import Context, Coordinates, Cost, Layout, ParamRule, Reads, Shape, TensorSpec

__version__ = "0.1.0"

_ROOMS = ("depth", "model", "ops", "parallel", "sequence")
_HOMES = {
    "cost": "cost",  # the functions of rooms of that name, reached by `from twoaxis.cost import ...`
    "train": "train",
    "TrainConfig": "train",
    "compare": "study",
    **dict.fromkeys(("InputError", "RunError"), "errors"),
    **dict.fromkeys(("Decoder", "ModelConfig", "generate", "generate_stream", "generate_text"), "model"),
    **dict.fromkeys(("load", "presets", "save", "depth_windows", "expected_depth"), "model"),
    **dict.fromkeys(("axis_shares", "freeze_axes"), "model"),
    **dict.fromkeys(("methods", "parse_spec", "register", "unregister"), "spec"),
    **dict.fromkeys(("Context", "Coordinates", "Cost", "Layout", "ParamRule", "Reads"), "types"),
    **dict.fromkeys(("Shape", "TensorSpec"), "types"),
}
__all__ = [
    "Context",
    "Coordinates",
    "Cost",
    "Decoder",
    "InputError",
    "Layout",
    "ModelConfig",
    "ParamRule",
    "Reads",
    "RunError",
    "Shape",
    "TensorSpec",
    "TrainConfig",
    "__version__",
    "axis_shares",
    "compare",
    "cost",
    "depth",
    "depth_windows",
    "expected_depth",
    "freeze_axes",
    "generate",
    "generate_stream",
    "generate_text",
    "load",
    "methods",
    "model",
    "ops",
    "parallel",
    "parse_spec",
    "presets",
    "register",
    "save",
    "sequence",
    "train",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """A room, or a name from its room."""
    if name in _ROOMS:
        return importlib.import_module(f"twoaxis.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'twoaxis' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"twoaxis.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Importing a room binds it here as an attribute, except `cost` and `train`, which stay the functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
