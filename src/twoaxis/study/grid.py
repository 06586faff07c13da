"""A study: rows of (depth, sequence) to train on the same data, and the preset of `twoaxis compare`."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from twoaxis.cost import budget_of, match_mlp
from twoaxis.errors import InputError
from twoaxis.model import ModelConfig, presets
from twoaxis.spec import nearest
from twoaxis.train import TrainConfig

Match = Literal["width", "parameters", "flops"]
OUT = "runs/compare"
STANDARD = ("attention", "mlp")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison.

    sequence: one block's sublayers, or one list per block. train: settings of `TrainConfig` in which this row
    differs from the study's, e.g. {"lr": 1e-3}; rows whose settings differ are shown and never ranked.
    """

    name: str
    depth: str = "additive"
    sequence: Sequence[Any] = STANDARD
    train: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The row's folder name."""
        plain = re.sub(r"[^A-Za-z0-9.=-]+", "_", self.name).strip("_.") or "row"
        mark = hashlib.sha256(self.name.encode()).hexdigest()[:8]
        return plain if len(plain) <= 60 else f"{plain[:50]}_{mark}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared. The first row is the baseline.

    seeds: each row is trained once per seed; a seed fixes weights and the order of the data. match: "width"
    keeps every model's widths; "parameters" or "flops" changes the MLP width of every other row until its
    count meets the baseline's. threads: of torch, in every run and measurement; None leaves them as they are, 1
    is steady on a shared machine, where a second thread of a small model mostly waits. training: data, sizes and
    optimisation of every run (its depth, sequence and seed are replaced by the row's). Raises InputError for an
    empty, contradictory or unbuildable study.
    """

    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = (0,)
    match: Match = "width"
    threads: int | None = None
    training: TrainConfig = field(default_factory=TrainConfig)
    out: str = OUT

    def __post_init__(self) -> None:
        if not self.rows:
            raise InputError(
                "a study needs at least one row; give --depth or --sequence, or rows in the file"
            )
        if self.match not in get_args(Match):
            raise InputError(f"match={self.match!r}: allowed is {' or '.join(map(repr, get_args(Match)))}")
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise InputError(
                f"threads={self.threads!r}: allowed is 1 or more, or none to leave them as they are"
            )
        if not self.seeds or any(type(s) is not int or s < 0 for s in self.seeds):
            raise InputError(f"seeds={list(self.seeds)}: allowed are one or more integers of 0 or more")
        named: dict[str, list[Any]] = {
            "seed": list(self.seeds),
            "row": [row.name for row in self.rows],
            "row's folder": [row.slug for row in self.rows],
        }
        for what, values in named.items():
            twice = [v for v in values if values.count(v) > 1]
            if twice:
                raise InputError(f"the {what} {twice[0]!r} is given twice; give each once")
        for row in self.rows:
            for key in {"model", "seed"} & row.train.keys():
                raise InputError(f"row {row.name!r}: {key} is the study's; rows may change other settings")
            budget_of(self.config(row, self.seeds[0]).model, "parameters")  # refuses what cannot be built

    @property
    def baseline(self) -> Row:
        """The row that the others are compared with."""
        return self.rows[0]

    def config(self, row: Row, seed: int) -> TrainConfig:
        """Everything that fixes one run."""
        sequence: Any = [s if isinstance(s, str) else list(s) for s in row.sequence]
        model = dataclasses.replace(self.training.model, depth=row.depth, sequence=sequence)
        cfg = TrainConfig.from_dict(
            {**self.training.to_dict(), **row.train, "model": model, "seed": seed}, f"row {row.name!r}"
        )
        if self.match == "width" or row == self.baseline:
            return cfg
        size = (cfg.batch_size, cfg.seq_len)
        target = budget_of(self.config(self.baseline, seed).model, self.match, *size)
        return dataclasses.replace(cfg, model=match_mlp(cfg.model, self.match, target, *size))

    def runs(self) -> list[tuple[Row, int]]:
        """Every (row, seed), seed by seed, so that a stopped study has whole seeds first."""
        return [(row, seed) for seed in self.seeds for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """The study as plain data, as a STUDY.yaml holds it."""
        training = self.training.to_dict()
        del training["seed"], training["model"]["depth"], training["model"]["sequence"]
        rows = [
            {
                "name": row.name,
                "depth": row.depth,
                "sequence": [s if isinstance(s, str) else list(s) for s in row.sequence],
                "train": dict(row.train),
            }
            for row in self.rows
        ]
        return {
            "rows": rows,
            "seeds": list(self.seeds),
            "match": self.match,
            "threads": self.threads,
            "out": self.out,
            "train": training,
        }


def cross(depths: Sequence[str], sequences: Sequence[Sequence[Any]]) -> tuple[Row, ...]:
    """Every depth method with every block, named by what differs."""
    return tuple(
        Row(name=_legend(depth, block, len(depths), len(sequences)), depth=depth, sequence=tuple(block))
        for depth in depths
        for block in sequences
    )


def named(names: Sequence[str]) -> tuple[Row, ...]:
    """A row for each name in `twoaxis.presets`."""
    for name in names:
        if name not in presets:
            raise InputError(f"preset {name!r} is unknown; {nearest(name, presets)}")
    return tuple(Row(name=name, **presets[name]) for name in names)


def _legend(depth: str, block: Sequence[Any], n_depths: int, n_sequences: int) -> str:
    flat = all(isinstance(s, str) for s in block)
    text = ", ".join(block) if flat else " | ".join(", ".join(sublayers) for sublayers in block)
    return depth if n_sequences == 1 else f"[{text}]" if n_depths == 1 else f"{depth} [{text}]"


def with_steps(training: TrainConfig, steps: int) -> TrainConfig:
    """The same training over another number of steps: warm-up and validations keep their share of it."""
    share = steps / training.steps
    every = training.eval_every
    return dataclasses.replace(
        training,
        steps=steps,
        warmup_steps=round(training.warmup_steps * share),
        eval_every=None if every is None else max(1, round(every * share)),
    )


def preset_training() -> TrainConfig:
    """The data, sizes and optimisation of the preset: minutes for six rows on two CPU cores.

    The width is small, so weights start at about 1 / sqrt(d) instead of 0.02 (`docs/log.md` has the numbers).
    """
    return TrainConfig(
        model=ModelConfig(d_model=64, n_blocks=6, n_heads=4, init_std=0.1),
        data="shakespeare",
        seq_len=128,
        batch_size=8,
        steps=300,
        lr=5e-3,
        warmup_steps=20,
        eval_every=30,
        eval_tokens=8192,
    )


def preset() -> Study:
    """What `twoaxis compare` runs by default: six methods of one width on Shakespeare, one seed."""
    return Study(
        rows=(
            Row(name="standard Transformer"),
            Row(name="DenseFormer", depth="denseformer"),
            Row(name="block AttnRes", depth="attnres(block_sublayers=3)"),
            Row(name="Hyper-Connections", depth="hyper_connections"),
            Row(name="DDL", depth="ddl"),
            Row(name="local-to-global block", sequence=("short_swa(window=16)", *STANDARD)),
        ),
        threads=1,
        training=preset_training(),
    )
