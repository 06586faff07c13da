"""The configuration of a model: two choices and a size."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from twoaxis import spec
from twoaxis.depth.connection import DepthConfig
from twoaxis.depth.history_spec import parse_history, settled
from twoaxis.errors import InputError
from twoaxis.sequence import SequenceConfig, carried_out
from twoaxis.types import DTYPES, Layout

Blocks = list[str] | list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that fixes a model's function and size.

    depth: the spec of a depth method. sequence: the specs of one block's sublayers, or one such list per block.
    n_kv_heads: None is n_heads. dropout: on every core's output. init_std: see `model/init.py`.
    state_dtype: of the residual state, under autocast too (a float64 model keeps float64 states).
    history: how the depth method's earlier layers are kept, "full", "bfloat16", "float16", "int8", "recompute", or
    several, "int8, recompute"; "window(4)" and "block_sums(3)" set the method's own options and are not kept here.
    """

    vocab_size: int = 256
    d_model: int = 128
    n_blocks: int = 6
    n_heads: int = 4
    n_kv_heads: int | None = None
    depth: str = "additive"
    sequence: Blocks = field(default_factory=lambda: ["attention", "mlp"])
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    qk_norm: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    state_dtype: str = "float32"
    history: str = "full"

    def __post_init__(self) -> None:
        depth, history = settled(spec.parse_spec("depth", self.depth), parse_history(self.history))
        object.__setattr__(self, "depth", depth.spec())
        object.__setattr__(self, "history", history.text())
        for name in ("vocab_size", "d_model", "n_blocks", "n_heads"):
            self._require(
                name, type(getattr(self, name)) is int and getattr(self, name) >= 1, "an integer of 1 or more"
            )
        kv = self.n_kv_heads
        self._require(
            "n_kv_heads", kv is None or (type(kv) is int and kv >= 1), "an integer of 1 or more, or None"
        )
        for name in ("tie_embeddings", "qk_norm"):
            self._require(name, type(getattr(self, name)) is bool, "true or false")
        for name in ("norm_eps", "rope_base", "dropout", "init_std"):
            value = getattr(self, name)
            fits = type(value) in (int, float) and 0 <= value <= sys.float_info.max
            self._require(name, fits, "a finite number of 0 or more")
            object.__setattr__(self, name, float(value))
        self._require("dropout", self.dropout < 1, "a number below 1")
        self._require("rope_base", self.rope_base > 0, "a number above 0")
        self._require("state_dtype", self.state_dtype in list(DTYPES), " or ".join(DTYPES))
        if self.d_model % self.n_heads:
            raise InputError(
                f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; change one of them"
            )
        if self.n_heads % (kv or self.n_heads):
            raise InputError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={kv}; change one of them"
            )
        object.__setattr__(self, "sequence", self._checked_sequence())
        self.block_configs()  # presets that do not fit their block are refused here

    def _require(self, name: str, fits: bool, allowed: str) -> None:
        if not fits:
            raise InputError(f"{name}={getattr(self, name)!r}: allowed is {allowed}")

    def _checked_sequence(self) -> Blocks:
        given = self.sequence
        if isinstance(given, str) or not isinstance(given, list | tuple) or not given:
            raise InputError(
                f"sequence={given!r}: give a list of sublayers such as ['attention', 'mlp'], or one list per block"
            )
        texts = [s for s in given if isinstance(s, str)]
        if len(texts) == len(given):
            return [spec.parse_spec("sequence", s).spec() for s in texts]
        if len(given) != self.n_blocks:
            raise InputError(
                f"sequence has {len(given)} lists and the model {self.n_blocks} blocks; give one list per block"
            )
        lists = []
        for block in given:
            if isinstance(block, str) or not isinstance(block, list | tuple) or not block:
                raise InputError(
                    f"sequence has {block!r} among lists of sublayers; give each block a non-empty list"
                )
            lists.append([spec.parse_spec("sequence", s).spec() for s in block])
        return lists

    def depth_config(self) -> DepthConfig:
        """The depth method's options."""
        config: DepthConfig = spec.parse_spec("depth", self.depth)
        return config

    def block_configs(self) -> list[list[SequenceConfig]]:
        """The cores' options, one list per block, presets carried out."""
        flat = [s for s in self.sequence if isinstance(s, str)]
        lists = [flat] * self.n_blocks if flat else self.sequence
        return [carried_out([spec.parse_spec("sequence", s) for s in block]) for block in lists]

    def layout(self) -> Layout:
        """What a method may know of this model."""
        return Layout(
            d_model=self.d_model,
            blocks=tuple(tuple(c.spec() for c in block) for block in self.block_configs()),
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads or self.n_heads,
            norm_eps=self.norm_eps,
            rope_base=self.rope_base,
            qk_norm=self.qk_norm,
            dropout=self.dropout,
            init_std=self.init_std,
            state_dtype=self.state_dtype,
            history=self.history,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`; unknown keys are refused with the nearest match."""
        if not isinstance(data, dict):
            raise InputError(f"a model configuration is a table of fields such as d_model, not {data!r}")
        known = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in known:
                raise InputError(f"model configuration has no field {key!r}; {spec.nearest(str(key), known)}")
        return cls(**data)

    def to_json(self) -> str:
        """Every field as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"
