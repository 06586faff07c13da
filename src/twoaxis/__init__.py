"""twoaxis: how a Transformer carries information along depth and along the sequence."""

from typing import Any

from twoaxis import depth, model, ops, sequence
from twoaxis.cost import cost  # the function; the room is reached by `from twoaxis.cost import ...`
from twoaxis.errors import InputError, RunError
from twoaxis.model import Decoder, ModelConfig, generate, generate_stream, generate_text, load, presets, save
from twoaxis.spec import methods, parse_spec, register, unregister
from twoaxis.train import TrainConfig, train  # `train` is the function, as with cost
from twoaxis.types import Context, Coordinates, Cost, Layout, ParamRule, Reads, Shape, TensorSpec

__version__ = "0.1.0"

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
    "compare",
    "cost",
    "depth",
    "generate",
    "generate_stream",
    "generate_text",
    "load",
    "methods",
    "model",
    "ops",
    "parse_spec",
    "presets",
    "register",
    "save",
    "sequence",
    "train",
    "unregister",
]


def __getattr__(name: str) -> Any:
    """`twoaxis.compare`, loaded when it is first asked for: comparing brings statistics and templates."""
    if name == "compare":
        from twoaxis.study import compare

        return compare
    raise AttributeError(f"module 'twoaxis' has no attribute {name!r}")
