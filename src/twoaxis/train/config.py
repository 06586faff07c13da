"""Everything that fixes a training run, and its text form `config.yaml`."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import yaml

from twoaxis import spec
from twoaxis.depth.history_spec import parse_history
from twoaxis.errors import InputError
from twoaxis.model import ModelConfig
from twoaxis.model.saving import Saved, Saving
from twoaxis.train.keys import check_keys

Precision = Literal["float32", "autocast", "bf16_master"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Transport = Literal["auto", "full", "cached", "push"]
Sent = Literal["state", "bfloat16", "float16"]
Sharding = Literal["ddp", "fsdp"]
CheckpointFormat = Literal["file", "sharded"]
LOGGERS = ("tensorboard", "wandb", "trackio")
# Fields that do not change what is computed, up to rounding: a resumed run may set them anew.
FREE = (
    *("eval_every", "eval_tokens", "checkpoint_every", "keep_checkpoints", "loggers"),
    *("keep_every", "checkpoint_format", "checkpoint_async"),
    *("device", "compile", "checkpointing", "saved", "saved_every", "sharding", "tensor_parallel", "timeout"),
    *(
        "pipeline",
        "pipeline_virtual",
        "pipeline_schedule",
        "pipeline_split",
        "pipeline_transport",
        "pipeline_send",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: the model, the data, the optimisation. Wrong values raise InputError when it is made."""

    model: Annotated[ModelConfig, "the model, see ModelConfig"] = field(default_factory=ModelConfig)
    data: Annotated[str, "shakespeare, pydocs, or the path of a UTF-8 file or folder"] = "shakespeare"
    valid_fraction: Annotated[float, "share of a path's text held out for validation"] = 0.05
    tokenizer: Annotated[str, "byte, bpe:SIZE (trained on the data), or a folder with tokenizer.json"] = (
        "byte"
    )
    packing: Annotated[
        Literal["stream", "documents"], "rows cut from one stream, or documents kept apart"
    ] = "stream"
    seq_len: Annotated[int, "tokens per row, T"] = 256
    batch_size: Annotated[int, "rows per micro-batch, B"] = 16
    accumulation: Annotated[int, "micro-batches per step"] = 1
    steps: Annotated[int, "optimiser steps"] = 1000
    lr: Annotated[float, "largest learning rate"] = 2e-3
    min_lr_ratio: Annotated[float, "the last learning rate as a share of the largest"] = 0.1
    warmup_steps: Annotated[int, "steps over which the learning rate grows linearly"] = 50
    schedule: Annotated[Literal["cosine", "wsd", "constant"], "the learning rate after warm-up"] = "cosine"
    decay_fraction: Annotated[float, "share of all steps in which wsd decays, at the end"] = 0.2
    optimizer: Annotated[Literal["adamw", "muon"], "muon: for the matrices of cores, adamw for the rest"] = (
        "adamw"
    )
    weight_decay: Annotated[float, "decoupled decay of weight matrices (the model's rules say which)"] = 0.1
    betas: Annotated[tuple[float, ...], "adamw's two averaging constants"] = (0.9, 0.95)
    eps: Annotated[float, "adamw's epsilon"] = 1e-8
    grad_clip: Annotated[float, "largest gradient norm, 0 for no clipping"] = 1.0
    depth_loss: Annotated[float, "weight of the depth method's own loss term, if it has one"] = 0.0
    precision: Annotated[Precision, "autocast: bfloat16 products; bf16_master: bfloat16 weights too"] = (
        "float32"
    )
    checkpointing: Annotated[bool, "recompute blocks in the backward pass instead of keeping them"] = False
    saved: Annotated[
        Saved,
        "for backward: all; of blocks or of cores their inputs alone; host: all of it, in the host's memory",
    ] = "all"
    saved_every: Annotated[int, "blocks or cores: in every so many-th block only"] = 1
    chunked_loss: Annotated[bool, "logits for some tokens at a time: less memory, slower on a CPU"] = False
    compile: Annotated[bool, "compile each block with torch.compile"] = False
    seed: Annotated[int, "of weights, data order and dropout"] = 0
    eval_every: Annotated[int | None, "steps between validations; the last step is always validated"] = None
    eval_tokens: Annotated[int | None, "validation targets scored each time; all when not given"] = None
    checkpoint_every: Annotated[int | None, "steps between checkpoints; the last step is always saved"] = None
    keep_checkpoints: Annotated[int, "how many of the newest checkpoints stay"] = 2
    keep_every: Annotated[int | None, "checkpoints of steps that this divides stay too"] = None
    checkpoint_format: Annotated[
        CheckpointFormat, "file: whole tensors, written by the first process; sharded: each writes its own"
    ] = "file"
    checkpoint_async: Annotated[bool, "go on while a sharded checkpoint is being written"] = False
    loggers: Annotated[tuple[str, ...], "besides metrics.jsonl: tensorboard, wandb, trackio"] = ()
    init: Annotated[str | None, "start from the weights of this model folder or run folder"] = None
    data_parallel: Annotated[int, "groups of processes with rows of their own, `batch_size` each"] = 1
    sharding: Annotated[
        Sharding, "over data_parallel, ddp: weights whole on each; fsdp: weights and optimiser in shares"
    ] = "ddp"
    tensor_parallel: Annotated[int, "processes that the heads and inner widths are divided over"] = 1
    pipeline: Annotated[int, "processes that the blocks are divided over (torchrun --nproc-per-node N)"] = 1
    pipeline_virtual: Annotated[int, "stages per process"] = 1
    pipeline_schedule: Annotated[Schedule, "the order of micro-batches, which are the `accumulation`"] = (
        "1f1b"
    )
    pipeline_split: Annotated[tuple[int, ...], "blocks of each stage, 0 is allowed; even when not given"] = ()
    pipeline_transport: Annotated[Transport, "how the state crosses; auto: the fewest bytes"] = "auto"
    pipeline_send: Annotated[Sent, "what the state is cast to on its way; state: nothing"] = "state"
    timeout: Annotated[float, "minutes after which a process that waits for another gives up"] = 10.0
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps"] = "auto"

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            value = spec.checked("train", f.name, getattr(self, f.name), hints[f.name])
            object.__setattr__(self, f.name, value)
        for name in (
            "seq_len",
            "batch_size",
            "accumulation",
            "steps",
            "keep_checkpoints",
            "data_parallel",
            "tensor_parallel",
            "saved_every",
            "pipeline",
            "pipeline_virtual",
        ):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        self._require("batch_size", self.tokens_per_step < 2**31, "less than 2**31 tokens in a step")
        for name in ("eval_every", "eval_tokens", "checkpoint_every", "keep_every"):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "1 or more, or None")
        for name in ("warmup_steps", "weight_decay", "grad_clip", "depth_loss", "seed"):
            self._require(name, 0 <= getattr(self, name) < float("inf"), "0 or more")
        self._require("seed", self.seed < 2**64, "0 to 2**64 - 1")
        for name in ("lr", "eps", "timeout"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "above 0")
        for name in ("min_lr_ratio", "decay_fraction", "valid_fraction"):
            self._require(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        self._require("betas", len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two below 1")
        allowed = "False with checkpoint_format='file': only sharded ones are written in the background"
        later = self.checkpoint_async and self.checkpoint_format == "file"
        self._require("checkpoint_async", not later, allowed)
        term = self.model.depth_config().loss_term
        allowed = f"0: {self.model.depth} has no loss term of its own, as dynamic_window has"
        self._require("depth_loss", bool(term) or self.depth_loss == 0, allowed)
        allowed = "all or blocks with checkpointing, which is blocks"
        self._require("saved", not self.checkpointing or self.saved in ("all", "blocks"), allowed)
        again = self.checkpointing or self.saved in ("blocks", "cores")
        self._require(
            "saved_every", self.saved_every == 1 or again, "1 unless blocks or cores are recomputed"
        )
        allowed = "all or blocks with compile, which sees a block as one"
        self._require("saved", not self.compile or self.saved in ("all", "blocks"), allowed)
        rounds = parse_history(self.model.history).dtype != "full"
        allowed = "False with a history in fewer bits, which cannot pass between compiled blocks"
        self._require("compile", not (self.compile and rounds), allowed)
        several = max(self.pipeline, self.data_parallel, self.tensor_parallel) > 1
        self._require("chunked_loss", not (self.chunked_loss and several), "False over several processes")
        for name in self.loggers:
            self._require("loggers", name in LOGGERS, " or ".join(LOGGERS))

    def _require(self, name: str, fits: bool, allowed: str) -> None:
        if not fits:
            raise InputError(f"train({name}={getattr(self, name)!r}): allowed is {allowed}")

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimiser step, over all processes."""
        return self.batch_size * self.accumulation * self.data_parallel

    @property
    def saving(self) -> Saving:
        """What stays of a forward pass, as the model takes it."""
        return Saving("blocks" if self.checkpointing else self.saved, self.saved_every)

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one optimiser step, over all processes."""
        return self.rows_per_step * self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        data = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "the configuration") -> TrainConfig:
        """The inverse of `to_dict`. Fields left out take their defaults; unknown ones raise InputError."""
        mine, models = ([f.name for f in dataclasses.fields(c)] for c in (cls, ModelConfig))
        check_keys(data, mine, models, source)
        model = data.get("model") or {}
        return cls(
            **{**data, "model": model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)}
        )

    def to_yaml(self) -> str:
        """Every field as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
