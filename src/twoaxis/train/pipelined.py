"""A training run over the processes of a pipeline: launch, the pipeline itself, tensors brought together.

 torchrun --nproc-per-node N -m twoaxis train --pipeline N ...

The same command without torchrun runs on one process. Every process reads the same batches; process 0 writes the
run folder. A checkpoint is that of one process, so a run may go on with another number of processes, or one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from twoaxis.data import Batch
from twoaxis.errors import InputError
from twoaxis.model import Decoder
from twoaxis.parallel import Plan, check_schedule, plan_pipeline
from twoaxis.train.config import TrainConfig
from twoaxis.train.precision import Master, computing_in

MINUTES = 10  # after which a process that waits for another gives up


def plan_of(cfg: TrainConfig) -> Plan:
    """The plan of the pipeline that a run asks for."""
    if cfg.depth_loss:
        raise InputError(f"depth_loss={cfg.depth_loss}: a pipeline has no loss term of its own yet; use 0")
    check_schedule(cfg.pipeline_schedule, cfg.pipeline, cfg.pipeline_virtual, cfg.accumulation)
    return plan_pipeline(
        cfg.model,
        cfg.pipeline,
        cfg.pipeline_virtual,
        batch_size=cfg.batch_size,
        seq_len=cfg.seq_len,
        transport=cfg.pipeline_transport,
        counts=cfg.pipeline_split or None,
        send_dtype=None if cfg.pipeline_send == "state" else cfg.pipeline_send,
    )


def processes() -> int:
    """How many processes torchrun, or a process group that is there already, has; 1 without."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def process_group(cfg: TrainConfig) -> Iterator[int]:
    """The process group of a run, if it has several processes; yields the rank of this one."""
    n = processes()
    if n not in (1, cfg.pipeline):
        raise InputError(f"{n} processes and pipeline={cfg.pipeline}: give --pipeline {n}, or start as many")
    if n == 1 or dist.is_initialized():
        yield dist.get_rank() if n > 1 else 0
        return
    backend = "nccl" if cfg.device != "cpu" and torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(minutes=MINUTES))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


class Pipelined:
    """The pipeline of a run, and what its processes tell each other besides. `model` loses what others hold."""

    def __init__(self, cfg: TrainConfig, model: Decoder, device: torch.device) -> None:
        from twoaxis.parallel import Pipeline

        self.master: Master | None = None
        self.pipeline = Pipeline(
            model,
            plan_of(cfg),
            micro_batches=cfg.accumulation,
            schedule=cfg.pipeline_schedule,
            computing=lambda: computing_in(cfg.precision, device),
            after_backward=self._collect,
        )
        self.rank, self.device = dist.get_rank(), device

    def _collect(self) -> None:
        if self.master is not None:
            self.master.collect()

    def accumulate(self, master: Master, batches: list[Batch]) -> tuple[float, int]:
        """As `session.accumulate`: the gradient in `master`; the mean loss and the number of targets."""
        self.master = master
        tokens, targets = (torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "targets"))
        segments = [b.segments for b in batches if b.segments is not None]
        loss = self.pipeline.step(tokens, targets, segments=torch.cat(segments) if segments else None)
        self.pipeline.gradients.sum_shared(master.named)
        return float(loss), int((targets != -100).sum())

    def clip(self, master: Master, largest: float) -> float:
        """Scale the gradients of all processes to a norm of at most `largest`; the norm before."""
        return self.pipeline.gradients.clip(master.named, largest)

    def gathered(
        self, tensors: Mapping[str, Tensor], owner: Callable[[str], str] = str
    ) -> dict[str, Tensor] | None:
        """The tensors of all processes, on process 0; None on the others.

        owner: from a tensor's name to its parameter's, whose first holder sends it.
        """
        holders = self.pipeline.plan.holders
        kept = {n: t for n, t in tensors.items() if holders(owner(n))[0] == self.rank}
        mine = {n: t.detach().cpu().contiguous() for n, t in kept.items()}
        if self.rank:
            data = torch.frombuffer(bytearray(to_bytes(mine)), dtype=torch.uint8).to(self.device)
            dist.send(torch.tensor([data.numel()], device=self.device), 0)
            dist.send(data, 0)
            return None
        for rank in range(1, dist.get_world_size()):
            size = torch.zeros(1, dtype=torch.long, device=self.device)
            dist.recv(size, rank)
            data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
            dist.recv(data, rank)
            mine |= from_bytes(data.cpu().numpy().tobytes())
        return mine

    def first_says(self, values: list[float]) -> list[float]:
        """The numbers of process 0, on every process."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        told: list[float] = tensor.tolist()
        return told

    def anyone(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        tensor = torch.tensor([float(flag)], device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor.item())
