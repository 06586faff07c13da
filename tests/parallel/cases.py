"""What the processes of a `World` run: each function is called on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configurations import VOCAB, Case
from twoaxis import Decoder
from twoaxis.parallel import Pipeline, Plan, plan_pipeline

MICRO, BATCH, LENGTH = 4, 2, 5
BLOCKS = 5
SPLITS = {2: None, 4: (2, 0, 2, 1), 8: (1, 1, 0, 1, 1, 0, 0, 1)}  # by the number of stages
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def data(step: int, segments: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens and targets of one step, unlike in number of targets over micro-batches; segments."""
    draw = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCAB, (2, MICRO * BATCH, LENGTH), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
    targets[:BATCH] = -100  # a micro-batch without any
    ids = torch.tensor([[0, 0, 1, 1, 1], [3, 3, 3, 3, -1]]).repeat(MICRO, 1)
    return tokens, targets, ids if segments else None


def plan(depth: str, sequence: str, virtual: int, n_ranks: int, **options: Any) -> Plan:
    """The plan of a float64 model of these cases."""
    given = {
        "batch_size": BATCH,
        "seq_len": LENGTH,
        "state_dtype": "float64",
        "counts": SPLITS[n_ranks * virtual],
    }
    return plan_pipeline(
        Case(depth, sequence).config(n_blocks=BLOCKS), n_ranks, virtual, **{**given, **options}
    )


def equal_training(
    depth: str,
    sequence: str = "standard",
    *,
    schedule: str,
    virtual: int = 1,
    steps: int = 2,
    segments: bool = False,
    transports: tuple[str, ...] | None = None,
) -> dict[str, int]:
    """Descend with a pipeline and with one process: the gradients of every step are equal, for each transport.

    Also holds what is sent to the plan. Returns the bytes over all links, by transport.
    """
    case, n_ranks = Case(depth, sequence), dist.get_world_size()
    alone = case.model(n_blocks=BLOCKS)
    expected = [descend(alone, step, segments) for step in range(steps)]
    nbytes = plan(depth, sequence, virtual, n_ranks).nbytes
    for transport in transports or tuple(nbytes):
        model, planned = (
            case.model(n_blocks=BLOCKS),
            plan(depth, sequence, virtual, n_ranks, transport=transport),
        )
        pipeline = Pipeline(model, planned, micro_batches=MICRO, schedule=schedule)
        for step, (loss, gradients) in enumerate(expected):
            found, mine = descend(pipeline, step, segments)
            torch.testing.assert_close(found, loss, **CLOSE)
            assert set(mine) == planned.held[dist.get_rank()]
            torch.testing.assert_close(mine, {name: gradients[name] for name in mine}, **CLOSE)
        sent_as_planned(pipeline, steps)
    return nbytes


def descend(model: Decoder | Pipeline, step: int, segments: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """One step of plain gradient descent: the loss and the gradients before it."""
    tokens, targets, ids = data(step, segments)
    module = model.model if isinstance(model, Pipeline) else model
    module.zero_grad()
    if isinstance(model, Pipeline):
        loss = model.step(tokens, targets, segments=ids)
        model.sum_shared()
    else:
        loss = model.loss(tokens, targets, segments=ids)
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert all(g is not None for g in gradients.values())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter -= 0.01 * gradients[name]
    return loss.detach(), {n: g.clone() for n, g in gradients.items()}


def sent_as_planned(pipeline: Pipeline, steps: int) -> None:
    """Bytes and tensors on the wire are the plan's, forward and backward."""
    for link in pipeline.plan.links:
        for direction, rank in zip(("forward", "backward"), link.ranks, strict=True):
            if rank == dist.get_rank():
                times = steps * pipeline.micro_batches
                assert pipeline.wire.nbytes[link.index, direction] == times * link.nbytes[link.takes]
                assert pipeline.wire.tensors[link.index, direction] == times * len(link.sends)
