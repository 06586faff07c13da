"""Data parallelism: models with rows of their own, whole on each process (DDP) or in shares (FSDP2).

Both leave sums of gradients: each process divides its loss by the targets of all of them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from twoaxis.model import Decoder
from twoaxis.parallel.mesh import Mesh


def shard(model: Decoder, mesh: Mesh, *, low_precision: bool, ends: bool) -> frozenset[str]:
    """Divide the parameters of every block over the data processes; the names of those divided.

    ends: also what lies around the blocks, which then must run through `model(...)`. low_precision: gather and
    compute in bfloat16, keep and sum in float32. Single numbers (0-d) stay whole everywhere.
    """
    model.rebuilding = False  # that would use weights of other blocks than those gathered
    # states are views by design and no method writes into one
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    given: dict[str, Any] = {
        "mesh": mesh.devices["data"],
        "ignored_params": {p for p in model.parameters() if p.ndim == 0},
        "mp_policy": low if low_precision else MixedPrecisionPolicy(cast_forward_inputs=False),
    }
    tops = [*model.blocks, model] if ends else [*model.blocks]
    for module in tops:
        if any(p.ndim > 0 for p in module.parameters()):
            _sum(fully_shard(module, **given))
    prefix = "" if ends else "blocks."
    return frozenset(n for n, p in model.named_parameters() if n.startswith(prefix) and p.ndim > 0)


def _sum(module: Any) -> None:
    """Gradients are summed over processes, not averaged."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def sum_at_last(model: nn.Module, last: bool) -> None:
    """Whether the next backward pass of a sharded model sums gradients over processes; others only add up here."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last, recurse=False)


def replicate(model: Decoder, mesh: Mesh) -> DistributedDataParallel:
    """The model in torch's DDP, its gradients summed over the data processes while backward runs."""
    group = mesh.group("data")
    made = DistributedDataParallel(model, process_group=group)
    made.register_comm_hook(None, lambda _, bucket: _total(bucket, group))
    return made


def _total(bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """The sum of a bucket of gradients, where DDP by itself would take the mean."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    summed: torch.futures.Future[Tensor] = future.then(lambda done: done.value()[0])
    return summed
