"""Everything that fixes a training run, and its text form `config.yaml`."""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.model import ModelConfig

Precision = Literal["float32", "autocast", "bf16_master"]
LOGGERS = ("tensorboard", "wandb", "trackio")
# Fields that do not change what is computed, up to rounding: a resumed run may set them anew.
FREE = ("eval_every", "eval_tokens", "checkpoint_every", "keep_checkpoints", "loggers")
FREE += ("device", "compile", "checkpointing")


def option(default: Any, doc: str) -> Any:
    """A documented field; the command line shows `doc`."""
    make = {"default_factory": default} if callable(default) else {"default": default}
    return dataclasses.field(**make, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: the model, the data, the optimisation. Wrong values raise InputError when it is made."""

    model: ModelConfig = option(ModelConfig, "the model, see ModelConfig")
    data: str = option("shakespeare", "shakespeare, pydocs, or the path of a UTF-8 file or folder")
    valid_fraction: float = option(0.05, "share of a path's text held out for validation")
    tokenizer: str = option("byte", "byte, bpe:SIZE (trained on the data), or a folder with tokenizer.json")
    packing: Literal["stream", "documents"] = option(
        "stream", "rows cut from one stream, or documents kept apart"
    )
    seq_len: int = option(256, "tokens per row, T")
    batch_size: int = option(16, "rows per micro-batch, B")
    accumulation: int = option(1, "micro-batches per step")
    steps: int = option(1000, "optimiser steps")
    lr: float = option(2e-3, "largest learning rate")
    min_lr_ratio: float = option(0.1, "the last learning rate as a share of the largest")
    warmup_steps: int = option(50, "steps over which the learning rate grows linearly")
    schedule: Literal["cosine", "wsd", "constant"] = option("cosine", "the learning rate after warm-up")
    decay_fraction: float = option(0.2, "share of all steps in which wsd decays, at the end")
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "muon: for the matrices of cores, adamw for the rest"
    )
    weight_decay: float = option(0.1, "decoupled decay of weight matrices (the model's rules say which)")
    betas: tuple[float, ...] = option((0.9, 0.95), "adamw's two averaging constants")
    eps: float = option(1e-8, "adamw's epsilon")
    grad_clip: float = option(1.0, "largest gradient norm, 0 for no clipping")
    precision: Precision = option("float32", "autocast: bfloat16 products; bf16_master: bfloat16 weights too")
    checkpointing: bool = option(False, "recompute blocks in the backward pass instead of keeping them")
    compile: bool = option(False, "compile each block with torch.compile")
    seed: int = option(0, "of weights, data order and dropout")
    eval_every: int | None = option(None, "steps between validations; the last step is always validated")
    eval_tokens: int | None = option(None, "validation targets scored each time; all when not given")
    checkpoint_every: int | None = option(None, "steps between checkpoints; the last step is always saved")
    keep_checkpoints: int = option(2, "how many of the newest checkpoints stay")
    loggers: tuple[str, ...] = option((), "besides metrics.jsonl: tensorboard, wandb, trackio")
    init: str | None = option(None, "start from the weights of this model folder or run folder")
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps")

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = spec.checked("train", f.name, getattr(self, f.name), hints[f.name])
            object.__setattr__(self, f.name, value)
        for name in ("seq_len", "batch_size", "accumulation", "steps", "keep_checkpoints"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in ("eval_every", "eval_tokens", "checkpoint_every"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "1 or more, or None")
        for name in ("warmup_steps", "weight_decay", "grad_clip", "seed"):
            self._require(name, 0 <= getattr(self, name) < float("inf"), "0 or more")
        for name in ("lr", "eps"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "above 0")
        for name in ("min_lr_ratio", "decay_fraction", "valid_fraction"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        self._require("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two below 1")
        for name in self.loggers:
            self._require("loggers", name in LOGGERS, " or ".join(LOGGERS))

    def _require(self, name: str, fits: bool, allowed: str) -> None:
        if not fits:
            raise InputError(f"train({name}={getattr(self, name)!r}): allowed is {allowed}")

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimiser step."""
        return self.batch_size * self.seq_len * self.accumulation

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        data = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "the configuration") -> TrainConfig:
        """The inverse of `to_dict`. Fields left out take their defaults; unknown ones raise InputError."""
        check_keys(data, source)
        model = data.get("model") or {}
        return cls(
            **{**data, "model": model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)}
        )

    def to_yaml(self) -> str:
        """Every field as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def check_keys(data: Any, source: str) -> None:
    """Refuse keys that are not fields, saying where a key belongs or which one is nearest."""
    mine = [f.name for f in dataclasses.fields(TrainConfig)]
    models = [f.name for f in dataclasses.fields(ModelConfig)]
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(model, dict | ModelConfig | None):
        raise InputError(
            f"{source} must be a list of `field: value` lines, with those of the model under `model:`"
        )
    for place, keys, known in (("", data, mine), ("model: ", model, models)):
        for key in keys if isinstance(keys, dict) else ():
            if key not in known:
                raise InputError(f"{source}: {place}no field {key!r}; {_where(str(key), mine, models)}")


def _where(key: str, mine: list[str], models: list[str]) -> str:
    options = {
        f.name: name
        for axis in ("sequence", "depth")
        for name, method in spec.methods(axis).items()  # type: ignore[arg-type]
        for f in dataclasses.fields(method.Config)  # type: ignore[attr-defined]
    }
    place = {
        name: f"{name!r} is an option of a method, written as in '{of}({name}=...)'"
        for name, of in options.items()
    }
    place |= {name: f"{name!r} belongs under `model:`" for name in models}
    place |= {name: f"{name!r} belongs at the top level" for name in mine}
    found = spec.nearest(key, place).partition("?")[0].removeprefix("did you mean ").strip("'")
    if key in place or found in place:
        hint = place[key if key in place else found]
        return hint if key in place else f"did you mean {found!r}? {hint}"
    return f"known: {', '.join(mine)}"


class _Loader(yaml.SafeLoader):
    """YAML with the floats of its version 1.2, so that 1e-3 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; unreadable files and other content raise InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}; give a UTF-8 YAML file") from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} must be a list of `field: value` lines")
    return data
