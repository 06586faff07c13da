"""What is different when a run has several processes: how the model is divided and gradients come together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twoaxis.data import Batch
from twoaxis.model import Decoder
from twoaxis.model.files import plain_name
from twoaxis.parallel.mesh import Axis, Mesh, norm_over
from twoaxis.parallel.placement import Placement, put
from twoaxis.train.config import TrainConfig
from twoaxis.train.filling import Filling
from twoaxis.train.gathering import gathered
from twoaxis.train.pipelined import Pipelined
from twoaxis.train.precision import Master
from twoaxis.train.processes import check_division, processes
from twoaxis.train.state import Part


class Team:
    """This process's part in a run. `model`, whole and the same on every process, is divided in place.

    filling: gives a model on the meta device its numbers, once it is divided.
    placements: where each parameter that is trained here lies in the whole one. rows: (rank, number) of this
    process among those that read rows of their own. micro_batches: those of a step, on this process.
    """

    def __init__(
        self, cfg: TrainConfig, model: Decoder, device: torch.device, filling: Filling | None = None
    ) -> None:
        self.cfg, self.model, self.device = cfg, model, device
        self.mesh: Mesh | None = None
        self.pipelined: Pipelined | None = None
        self.ddp: Any = None  # torch's DDP around the model
        self.shared_out: frozenset[str] = frozenset()  # divided by FSDP
        self.cut: frozenset[str] = frozenset()  # divided over the tensor processes
        self.partial: frozenset[str] = frozenset()  # whole on each of those, used for a part
        self.placements = {plain_name(n): Placement.whole(p.shape) for n, p in model.named_parameters()}
        self.rows, self.micro_batches = (0, 1), cfg.accumulation * cfg.data_parallel
        if processes() > 1:
            check_division(cfg)
            self.mesh = Mesh(
                device, data=cfg.data_parallel, tensor=cfg.tensor_parallel, pipeline=cfg.pipeline
            )
            self.rows, self.micro_batches = (self.mesh.at["data"], cfg.data_parallel), cfg.accumulation
            self._divide(self.mesh)
            if filling is not None:
                filling.fill(self.placements)
            if cfg.data_parallel > 1 and self._by_ddp:
                from twoaxis.parallel.replicas import replicate

                self.ddp = replicate(model, self.mesh)

    def _divide(self, mesh: Mesh) -> None:
        cfg, model = self.cfg, self.model
        if cfg.pipeline > 1:
            self.pipelined = Pipelined(cfg, model, self.device, mesh)
        if cfg.tensor_parallel > 1:
            from twoaxis.parallel.tensor import cut

            placed, self.partial = cut(model, mesh)
            self.placements |= placed
            self.cut = frozenset(placed)
        held = {n for n, _ in model.named_parameters()}
        self.placements = {n: at for n, at in self.placements.items() if n in held}
        if cfg.data_parallel > 1 and cfg.sharding == "fsdp":
            from twoaxis.parallel.replicas import shard

            low = cfg.precision == "bf16_master"
            more: dict[str, Any] = {}
            if self.pipelined is not None:
                more = {"lent": self.pipelined.lent(), "first": self.pipelined.pipeline.is_first}
            self.shared_out = shard(model, mesh, low_precision=low, **more)
            for name in self.shared_out:
                self.placements[name] = self.placements[name].share(*self.rows)

    @property
    def _by_ddp(self) -> bool:
        """Whether torch's DDP sums gradients during backward; else they are summed after it.

        It cannot in a pipeline, and would sum bfloat16 gradients before they reach their float32 masters.
        """
        return self.cfg.sharding == "ddp" and self.pipelined is None and self.cfg.precision != "bf16_master"

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.mesh is None or self.mesh.rank == 0

    def files_group(self) -> dist.ProcessGroup:
        """A group of all processes for what is said about files, also beside the training's own messages."""
        from datetime import timedelta

        return dist.new_group(backend="gloo", timeout=timedelta(minutes=self.cfg.timeout))

    def targets(self, batches: list[Batch]) -> int:
        """The number of targets of a step, over all processes."""
        mine = sum(int((batch.targets != -100).sum()) for batch in batches)
        return int(self.summed([float(mine)])[0])

    def before(self, last: bool) -> None:
        """Called before each micro-batch, with whether it is the step's last: gradients are summed with that one."""
        if self.shared_out and self.pipelined is None:
            from twoaxis.parallel.replicas import sum_at_last

            sum_at_last(self.model, last)
        elif self.ddp is not None:
            self.ddp.require_backward_grad_sync = last

    def finish(self, master: Master) -> None:
        """Sum what backward has not summed yet, once a step's backward passes are done."""
        if self.mesh is None:
            return
        if self.pipelined is not None:
            self.pipelined.pipeline.gradients.sum_shared(master.named)
        if self.ddp is None:
            loose = [p for n, p in master.named.items() if n not in self.shared_out]
            self.mesh.sum_gradients(loose, "data")
        self.mesh.sum_gradients(
            [master.named[n] for n in sorted(self.partial & master.named.keys())], "tensor"
        )

    def norm(self, master: Master) -> float:
        """The norm of the gradients of all processes."""
        if self.mesh is None:
            return master.norm()
        found = {n: p.grad for n, p in master.named.items() if p.grad is not None}
        return norm_over(g for n, g in found.items() if self.answers(n))

    def answers(self, name: str) -> bool:
        """Whether this process answers for its part of a parameter: in norms, and when files are written."""
        if self.mesh is None:
            return True
        at = self.mesh.at
        if self.pipelined is not None and self.pipelined.holders(name)[0] != at["pipeline"]:
            return False
        return (name in self.shared_out or at["data"] == 0) and (name in self.cut or at["tensor"] == 0)

    @property
    def answers_for_rows(self) -> bool:
        """Whether this process answers for the generators of those that read the same rows."""
        return self.mesh is None or self.mesh.at["tensor"] == self.mesh.at["pipeline"] == 0

    @property
    def alone(self) -> bool:
        """Whether this is the run's only process."""
        return self.mesh is None

    def gathered(self, parts: Mapping[str, Part]) -> dict[str, Tensor] | None:
        """The whole tensors of which processes have these parts, on process 0; None on the others."""
        if self.mesh is None:
            return {name: part.tensor for name, part in parts.items()}
        return gathered({n: (p.tensor, p.place) for n, p in parts.items() if p.mine}, self.mesh)

    @property
    def shares(self) -> Team | None:
        """This, if some parameters are in parts; as the optimiser needs it."""
        return self if self.shared_out or self.cut else None

    def whole(self, name: str, share: Tensor) -> Tensor:
        """The tensor that the shares of all processes make, on each of those that have one."""
        assert self.mesh is not None
        place = self.placements[name]
        whole = torch.zeros(place.shape, dtype=share.dtype, device=share.device)
        for offsets, piece in place.pieces(share):
            put(whole, offsets, piece)
        divided: dict[Axis, frozenset[str]] = {"data": self.shared_out, "tensor": self.cut}
        for axis, names in divided.items():
            if name in names:
                self.mesh.sum(whole, axis)
        return whole

    def share(self, name: str, whole: Tensor) -> Tensor:
        """This process's share of a whole tensor."""
        return self.placements[name].of(whole)

    def summed(self, values: list[float]) -> list[float]:
        """Numbers summed over the processes with rows of their own."""
        if self.mesh is None or self.cfg.data_parallel == 1:
            return values
        told: list[float] = self.mesh.sum(self._numbers(values), "data").tolist()
        return told

    def first_says(self, values: list[float]) -> list[float]:
        """The numbers of process 0, on every process."""
        if self.mesh is None:
            return values
        tensor = self._numbers(values)
        dist.broadcast(tensor, 0)
        told: list[float] = tensor.tolist()
        return told

    def anyone(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        if self.mesh is None:
            return flag
        return self.mesh.sum(self._numbers([float(flag)])).item() > 0

    def _numbers(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)
