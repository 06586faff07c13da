"""The flags of `twoaxis train`: every field of a run's and of a model's configuration, and its own."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any

import tyro

from twoaxis.model import ModelConfig
from twoaxis.train import TrainConfig

MODEL = {
    "vocab_size": "size of the vocabulary; by default the tokenizer's",
    "d_model": "width d",
    "n_blocks": "number of blocks L",
    "n_heads": "attention heads",
    "n_kv_heads": "heads of keys and values; as n_heads when not given",
    "depth": "depth method, such as ddl or 'attnres(block_sublayers=3)'; see twoaxis methods",
    "sequence": "the sublayers of a block, such as 'short_swa(window=64)' attention mlp",
    "tie_embeddings": "whether the head is the embedding table",
    "norm_eps": "epsilon of the norms",
    "rope_base": "base of the rotary angles",
    "qk_norm": "normalise queries and keys",
    "dropout": "share dropped of every core's output",
    "init_std": "standard deviation of initial weights",
    "state_dtype": "dtype of the residual state",
    "history": "how earlier layers are kept: full, bfloat16, float16, int8, recompute, 'window(4)', 'block_sums(3)'",
}
DEFAULTS = {**dataclasses.asdict(ModelConfig()), **dataclasses.asdict(TrainConfig())}


def _flags() -> list[tuple[str, Any, Any]]:
    """A flag for every field of both configurations but `model` itself: (name, annotated type, field).

    Switches have their field's default; other flags are None when not given.
    """
    flags: list[tuple[str, Any, Any]] = []
    for config, docs in ((ModelConfig, MODEL), (TrainConfig, {})):
        for name, hint in typing.get_type_hints(config, include_extras=True).items():
            if name == "model":
                continue
            kind, doc = (hint, docs[name]) if docs else (typing.get_args(hint)[0], hint.__metadata__[0])
            kind = tuple[str, ...] if name == "sequence" else kind
            default = DEFAULTS[name]
            if kind is bool:
                arg = tyro.conf.arg(help=doc)
            else:
                hint = f"(default: {_spell(default)})"
                arg = tyro.conf.arg(help=doc, help_behavior_hint=hint, metavar=_allowed(kind))
            field = dataclasses.field(default=default if kind is bool else None)
            flags.append((name, Annotated[kind if kind is bool else kind | None, arg], field))
    return flags


def _allowed(kind: Any) -> str:
    """How a flag's value is named in the help."""
    if typing.get_origin(kind) is typing.Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    words = [a.__name__ for a in (kind, *typing.get_args(kind)) if a in (str, int, float)]
    several = typing.get_origin(kind) is tuple
    return f"{words[0].upper()} [{words[0].upper()} ...]" if several else words[0].upper()


def _spell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


Out = Annotated[str | None, tyro.conf.arg(metavar="FOLDER", help="the run folder to write")]
File = Annotated[
    str | None,
    tyro.conf.arg(metavar="FILE", help="YAML file with fields of a run, those of the model under `model:`"),
]
Resume = Annotated[
    bool, tyro.conf.arg(help="go on with the run in --out from its newest complete checkpoint")
]
PlanOnly = Annotated[
    bool,
    tyro.conf.arg(help="print what would cross between the stages of --pipeline N, and do not train"),
]
DryRunOnly = Annotated[
    bool,
    tyro.conf.arg(
        help="print what each process would hold and send, and whether it fits; do not train, needs no weights"
    ),
]
SizeOf = Annotated[
    str | None,
    tyro.conf.arg(metavar="NAME", help="a model's size by name: 1b, 8b, 70b, or as in advise --model"),
]
MeshOf = Annotated[
    str,
    tyro.conf.arg(metavar="MESH", help="of a dry run: copies, slices, stages, as in dp=8,tp=4,pp=4"),
]
MachineOf = Annotated[
    str | None,
    tyro.conf.arg(metavar="NAME", help="of a dry run: the machine, as in advise --hardware"),
]
MemoryOf = Annotated[
    float | None,
    tyro.conf.arg(metavar="GB", help="of a dry run: memory of one process, where not the machine's"),
]
Json = Annotated[bool, tyro.conf.arg(help="print the results as JSON")]
Args = dataclasses.make_dataclass(
    "Args",
    [
        ("out", Out, dataclasses.field(default=None)),
        ("resume", Resume, dataclasses.field(default=False)),
        ("config", File, dataclasses.field(default=None)),
        ("json", Json, dataclasses.field(default=False)),
        ("pipeline_plan", PlanOnly, dataclasses.field(default=False)),
        ("dry_run", DryRunOnly, dataclasses.field(default=False)),
        ("size", SizeOf, dataclasses.field(default=None)),
        ("mesh", MeshOf, dataclasses.field(default="")),
        ("hardware", MachineOf, dataclasses.field(default=None)),
        ("memory_gb", MemoryOf, dataclasses.field(default=None)),
        *_flags(),
    ],
    namespace={
        "__doc__": "Train one model. What a flag does not set comes from --config, then from the model that --init "
        "names, then from the defaults; --resume alone goes on with what the run folder says."
    },
)
