"""The processes of a run as a grid: pipeline x data x tensor, neighbours along `tensor` nearest to each other."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from twoaxis.errors import InputError

Axis = Literal["pipeline", "data", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data", "tensor")
BUCKET = 2**24  # numbers that are summed over processes at once


class Mesh:
    """This process among `pipeline * data * tensor` others, rank by rank in that order.

    Raises InputError, on every process, if the process group has another size.
    """

    def __init__(self, device: torch.device, *, data: int = 1, tensor: int = 1, pipeline: int = 1) -> None:
        self.device, self.sizes = device, {"pipeline": pipeline, "data": data, "tensor": tensor}
        world, n = dist.get_world_size(), pipeline * data * tensor
        if world != n:
            raise InputError(
                f"{world} processes for a grid of {data} (data) x {tensor} (tensor) x {pipeline} (pipeline) = {n}; "
                "start as many, or give sizes whose product is their number"
            )
        self.rank = dist.get_rank()
        self.devices = _grid(device.type, pipeline, data, tensor, dist.group.WORLD)
        self.at: dict[str, int] = {axis: self.devices.get_local_rank(axis) for axis in AXES}

    def group(self, axis: Axis) -> dist.ProcessGroup:
        """The processes that differ from this one along `axis` only, this one among them."""
        return self.devices.get_group(axis)

    def sum(self, values: Tensor, *axes: Axis) -> Tensor:
        """The sum over the processes along `axes` (all of them without any), in place."""
        if not axes:
            dist.all_reduce(values)
        for axis in axes:
            if self.sizes[axis] > 1:
                dist.all_reduce(values, group=self.group(axis))
        return values

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter], axis: Axis) -> None:
        """Give each parameter the sum of its gradients along `axis`, many at once.

        A process that did not use a parameter counts as zero; if none did, the gradient stays None.
        """
        for bucket in _buckets(parameters) if self.sizes[axis] > 1 else ():
            used = torch.tensor([p.grad is not None for p in bucket]).to(bucket[0])
            parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket]
            flat = torch.cat([used, *parts])
            dist.all_reduce(flat, group=self.group(axis))
            used, *sums = flat.split([len(bucket), *(p.numel() for p in bucket)])
            for parameter, total, any_use in zip(bucket, sums, used.tolist(), strict=True):
                parameter.grad = total.view_as(parameter) if any_use else None


def norm_over(counted: Iterable[Tensor]) -> float:
    """The norm of gradients over every process; each gives those that no other process counts too."""
    mine = list(counted)
    device = mine[0].device if mine else None
    square = sum(
        (g.double().square().sum() for g in mine), torch.zeros((), dtype=torch.float64, device=device)
    )
    dist.all_reduce(square)
    return float(square.sqrt())


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype together, some millions of numbers at a time."""
    kinds: dict[Any, list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        buckets = kinds.setdefault(parameter.dtype, [[]])
        if sum(p.numel() for p in buckets[-1]) >= BUCKET:
            buckets.append([])
        buckets[-1].append(parameter)
    return [bucket for buckets in kinds.values() for bucket in buckets]


@lru_cache(maxsize=16)
def _grid(device: str, pipeline: int, data: int, tensor: int, world: Any) -> DeviceMesh:
    """The groups of a grid, made once for each process group `world`."""
    return init_device_mesh(device, (pipeline, data, tensor), mesh_dim_names=AXES)
