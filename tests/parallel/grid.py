"""What the processes of a grid run, and one process to compare with: gradients and optimiser steps of a team."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import twoaxis
from configurations import VOCAB, Case
from twoaxis import InputError
from twoaxis.data import Batch
from twoaxis.parallel.placement import Placement
from twoaxis.train import TrainConfig
from twoaxis.train.optimizer import Optimizer, clip_factor
from twoaxis.train.precision import Master
from twoaxis.train.session import gradient
from twoaxis.train.state import Part
from twoaxis.train.team import Team

LENGTH, BLOCKS = 5, 3
GRID = {"batch_size": 2, "accumulation": 2, "grad_clip": 0.05, "lr": 1e-2}


def rows_of(cfg: TrainConfig, step: int, segments: bool) -> Batch:
    """All rows of a step, unlike in their numbers of targets; one micro-batch has none."""
    draw = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCAB, (2, cfg.rows_per_step, LENGTH), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
    targets[:2] = -100
    ids = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, -1]]).repeat(cfg.rows_per_step // 2, 1)
    return Batch(tokens, targets, ids if segments else None)


def batches_of(team: Team, cfg: TrainConfig, step: int, segments: bool) -> list[Batch]:
    """This process's micro-batches, as a Loader deals them."""
    rows, (rank, of) = rows_of(cfg, step, segments), team.rows
    starts = [(micro * of + rank) * cfg.batch_size for micro in range(team.micro_batches)]
    return [Batch(*(None if t is None else t[s : s + cfg.batch_size] for t in rows)) for s in starts]


def descended(
    depth: str,
    options: dict[str, Any],
    *,
    sequence: str = "standard",
    dtype: str = "float64",
    steps: int = 2,
    segments: bool = True,
    fields: dict[str, Any] | None = None,
    checkpointing: bool = False,
) -> tuple[list[tuple[float, int, float]], dict[str, Tensor] | None]:
    """(loss, targets, norm) of every step, and the whole gradients of the last and weights after it (first process)."""
    case, device = Case(depth, sequence), torch.device("cpu")
    fields = fields or {}
    model_cfg = case.config(n_blocks=BLOCKS, **fields)
    cfg = TrainConfig(model=model_cfg, **{**GRID, "seq_len": LENGTH, "device": "cpu", **options})
    model = case.model(getattr(torch, dtype), n_blocks=BLOCKS, **fields).train()
    model.checkpointing = checkpointing
    rules = model.param_rules()
    team = Team(cfg, model, device)
    master = Master(model, cfg.precision)
    optimizer = Optimizer(master.named, rules, cfg, team.shares, master.rounded)
    told = []
    for step in range(steps):
        master.zero_grad()
        loss, targets, _, norm = gradient(cfg, team, model, master, batches_of(team, cfg, step, segments))
        told.append((loss, targets, norm))
        found = {f"grad/{n}": p.grad.clone() for n, p in master.named.items() if p.grad is not None}
        optimizer.step(cfg.lr, clip_factor(norm, cfg.grad_clip))
    found |= {f"weight/{n}": p.detach() for n, p in master.named.items()}
    found |= {f"moment/{k}": t for k, t in optimizer.state().items() if t.ndim}
    parts = {}
    for key, tensor in found.items():
        name = key.partition("/")[2].partition("/")[0]
        place: Placement = team.placements[name]
        assert place.local_shape == tuple(tensor.shape), (key, place, tensor.shape)
        parts[key] = Part(tensor, place, team.answers(name))
    return told, team.gathered(parts)


def refused(depth: str, options: dict[str, Any]) -> str:
    """What a process says to options that do not fit."""
    fields = options.pop("fields", None)
    try:
        descended(depth, options, fields=fields)
    except InputError as error:
        return str(error)
    return "accepted"


def refused_run(cfg: dict[str, Any], out: str) -> str:
    """What a process says to going on with a run."""
    try:
        twoaxis.train(TrainConfig.from_dict(cfg), out, resume=True)
    except InputError as error:
        return str(error)
    return "accepted"


def full_disk(cfg: dict[str, Any], out: str, step: int, rank: int) -> str:
    """A run over these processes, on one of which the disk is full when a step is saved: what each says."""
    from twoaxis.train import checkpoint, dcp_save

    write = dcp_save.write_synced

    def full(path: Path, data: bytes) -> None:
        large = path.name.startswith(("shard", "model"))
        if f"{step:08d}" in str(path) and large and dist.get_rank() == rank:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        write(path, data)

    dcp_save.write_synced = checkpoint.write_synced = full
    try:
        twoaxis.train(TrainConfig.from_dict(cfg), out)
    except twoaxis.RunError as error:
        return str(error)
    finally:
        dcp_save.write_synced = checkpoint.write_synced = write
    return "done"
