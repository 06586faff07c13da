"""Data parallelism: models with rows of their own, whole on each process (DDP) or in shares (FSDP2).

Both leave sums of gradients: each process divides its loss by the targets of all of them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from twoaxis.model import Decoder
from twoaxis.parallel.mesh import Mesh


def shard(
    model: Decoder,
    mesh: Mesh,
    *,
    low_precision: bool,
    lent: frozenset[str] | None = None,
    first: bool = True,
) -> frozenset[str]:
    """Divide the parameters of `model` over the data processes, block by block and its ends; the names divided.

    lent: None if all runs through `model(...)`; in a pipeline the names of parameters that others than the block
    they lie in use, which stay whole, as does what a method's stream lends to blocks. first: whether this is a
    pipeline's first process, which uses a tied table as embeddings. low_precision: gather and compute in bfloat16,
    keep and sum in float32. Single numbers (0-d) stay whole everywhere.
    """
    model.rebuilding = False  # that would use weights of other blocks than those gathered
    # states are views by design and no method writes into one
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    named = dict(model.named_parameters())
    whole = {n for n, p in named.items() if p.ndim == 0 or n in (lent or ())}
    tops: list[nn.Module] = [*model.blocks]
    end, other = (model.embedding, model.head) if first else (model.head, model.embedding)
    if lent is None:
        tops.append(model)
    else:
        whole |= {n for n in named if n.startswith("stream.") and n != "stream.norm.weight"}
        tops += [end, model.stream]
    ignored = {named[n] for n in whole}
    given: dict[str, Any] = {
        "mesh": mesh.devices["data"],
        "ignored_params": ignored,
        "mp_policy": low if low_precision else MixedPrecisionPolicy(cast_forward_inputs=False),
        "reshard_after_forward": None if lent is None else True,  # else each would think itself the outermost
    }
    for module in tops:
        if not ignored.issuperset(module.parameters()):
            _sum(fully_shard(module, **given))
    register_fsdp_forward_method(model.stream, "close")  # nothing where the stream has no shares of its own
    if lent is not None and model.cfg.tie_embeddings and end.weight is not None:
        other.weight = end.weight  # a name and no more
    return frozenset(named.keys() - whole)


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
