"""What the processes of a `World` run: each function is called on every rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import twoaxis
from configurations import VOCAB, Case
from twoaxis import Decoder, InputError
from twoaxis.parallel import Pipeline, Plan, plan_pipeline
from twoaxis.train import TrainConfig
from twoaxis.train.optimizer import Optimizer, clip_factor
from twoaxis.train.precision import Master
from twoaxis.types import DTYPES

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


def plan(
    depth: str, sequence: str, virtual: int, n_ranks: int, history: str = "full", **options: Any
) -> Plan:
    """The plan of a float64 model of these cases."""
    given = {
        "batch_size": BATCH,
        "seq_len": LENGTH,
        "state_dtype": "float64",
        "counts": SPLITS[n_ranks * virtual],
    }
    cfg = Case(depth, sequence).config(n_blocks=BLOCKS, history=history)
    return plan_pipeline(cfg, n_ranks, virtual, **{**given, **options})


def equal_training(
    depth: str,
    sequence: str = "standard",
    *,
    schedule: str,
    virtual: int = 1,
    steps: int = 2,
    segments: bool = False,
    transports: tuple[str, ...] | None = None,
    dtype: str = "float64",
    history: str = "full",
    counts: tuple[int, ...] | None = None,
) -> dict[str, int]:
    """Descend with a pipeline and with one process: the gradients of every step are equal, for each transport.

    To 1e-10 in float64 and 1e-5 in float32, or ten times as far as one process comes from itself if its weights
    are rounded otherwise, where that is more: some options let rounding grow a hundredfold with each step.
    Also holds what is sent to the plan. Returns the bytes over all links, by transport.
    """
    case, n_ranks = Case(depth, sequence), dist.get_world_size()
    fields: dict[str, Any] = {"n_blocks": BLOCKS, "history": history}
    alone, moved = (case.model(DTYPES[dtype], **fields) for _ in range(2))
    expected = [descend(alone, step, segments) for step in range(steps)]
    least, eps = {"float64": (CLOSE["rtol"], 1e-15), "float32": (1e-5, 1e-7)}[dtype]

    @functools.cache
    def far() -> list[float]:
        """How far one process comes from itself, in each step."""
        nudge(moved, eps)
        others = [descend(moved, step, segments)[1] for step in range(steps)]
        return [max(distances(g, e[1]).values()) for g, e in zip(others, expected, strict=True)]

    given: dict[str, Any] = {"history": history, "state_dtype": dtype}
    given |= {"counts": counts} if counts else {}
    nbytes = plan(depth, sequence, virtual, n_ranks, **given).nbytes
    for transport in transports or tuple(nbytes):
        model = case.model(DTYPES[dtype], **fields)
        planned = plan(depth, sequence, virtual, n_ranks, transport=transport, **given)
        pipeline = Pipeline(model, planned, micro_batches=MICRO, schedule=schedule)
        for step, (loss, gradients) in enumerate(expected):
            found, mine = descend(pipeline, step, segments)
            assert set(mine) == planned.held[dist.get_rank()]
            mine, gradients = {"loss": found, **mine}, {"loss": loss, **gradients}
            within = max(distances(mine, gradients).values()) < least
            same(mine, gradients, least if within else min(max(least, 10 * far()[step]), 1e-3))
        sent_as_planned(pipeline, steps)
    return nbytes


@torch.no_grad()
def nudge(model: Decoder, by: float) -> None:
    """Multiply every weight by 1 + by or 1 - by."""
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        sign = torch.randint(2, parameter.shape, generator=draw) * 2 - 1
        parameter *= 1 + by * sign.to(parameter.dtype)


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, of its largest entry and of 1e-2 of the largest of all."""
    largest = {name: float(expected[name].abs().max()) for name in found}
    floor = 1e-2 * max(largest.values())
    return {n: float((t - expected[n]).abs().max()) / max(largest[n], floor) for n, t in found.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], close: float = CLOSE["rtol"]) -> None:
    wrong = distances(found, expected)
    name = max(wrong, key=lambda n: wrong[n])
    assert wrong[name] < close, f"{name}: {wrong[name]:.2g}, allowed is {close:.2g}"


def sent_over_links(depth: str, sequence: str, schedule: str, virtual: int = 1) -> dict[tuple[int, str], int]:
    """The bytes that this rank sends in one step of a model of three blocks, by link and direction."""
    n_ranks = dist.get_world_size()
    counts = {2: (1, 2), 4: (1, 0, 1, 1)}[n_ranks * virtual]
    given = {"batch_size": BATCH, "seq_len": LENGTH, "state_dtype": "float64", "counts": counts}
    model = Case(depth, sequence).model(n_blocks=3)
    planned = plan_pipeline(model.cfg, n_ranks, virtual, transport="full", **given)
    pipeline = Pipeline(model, planned, micro_batches=MICRO, schedule=schedule)
    descend(pipeline, 0, False)
    sent_as_planned(pipeline, 1)
    return dict(pipeline.wire.nbytes)


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
            parameter -= (
                1e-3 * gradients[name]
            )  # longer steps let rounding grow a hundredfold each (muddformer)
    return loss.detach(), {n: g.clone() for n, g in gradients.items()}


def sent_as_planned(pipeline: Pipeline, steps: int) -> None:
    """Bytes and tensors on the wire are the plan's, forward and backward."""
    for link in pipeline.plan.links:
        for direction, rank in zip(("forward", "backward"), link.ranks, strict=True):
            if rank == dist.get_rank():
                times = steps * pipeline.micro_batches
                assert pipeline.wire.nbytes[link.index, direction] == times * link.nbytes[link.takes]
                assert pipeline.wire.tensors[link.index, direction] == times * len(link.sends)


def equal_optimisation(depth: str, *, steps: int = 20, optimizer: str = "adamw", **options: Any) -> None:
    """Optimiser steps with clipping: every parameter stays equal, the norm is the same on every rank.

    To 1e-10, or ten times as far as one process whose weights are moved by 1e-15 comes, where that is more.
    """
    case, n_ranks, virtual = Case(depth), dist.get_world_size(), options.get("virtual", 1)
    cfg = TrainConfig(model=case.config(n_blocks=BLOCKS), optimizer=optimizer, lr=1e-4, grad_clip=0.05)
    alone, moved, model = (case.model(n_blocks=BLOCKS) for _ in range(3))
    nudge(moved, 1e-15)
    planned = plan(depth, "standard", virtual, n_ranks)
    pipeline = Pipeline(model, planned, micro_batches=MICRO, schedule=options["schedule"])
    mine, *others = (dict(m.named_parameters()) for m in (model, alone, moved))
    every, far = others[0], 0.0
    optimizers = [Optimizer(p, alone.param_rules(), cfg) for p in (mine, *others)]
    for step in range(steps):
        tokens, targets, _ = data(step)
        model.zero_grad()
        pipeline.step(tokens, targets)
        pipeline.sum_shared()
        norms, factors = [pipeline.gradients.clip(mine, cfg.grad_clip)], [1.0]
        for one in (alone, moved):
            one.zero_grad()
            one.loss(tokens, targets).backward()
            norms.append(Master(one, "float32").norm())
            factors.append(clip_factor(norms[-1], cfg.grad_clip))
        assert norms[1] > cfg.grad_clip
        far = max(far, float(abs(norms[2] - norms[1]) / norms[1]))
        assert abs(norms[0] - norms[1]) < min(max(1e-10, 10 * far), 1e-3) * norms[1]
        for optimizer_of, factor in zip(optimizers, factors, strict=True):
            optimizer_of.step(cfg.lr, factor)
    found = distances(mine, {name: every[name] for name in mine})
    moves = distances(others[1], every)
    assert max(found.values()) < min(max(1e-10, 10 * max(moves.values())), 1e-3)


def clipped() -> tuple[float, float, float]:
    """Gradients of norm 3 on the first rank and 4 on the second, clipped to 1: norm before, own and shared after."""
    model, rank = Case("additive").model(n_blocks=2), dist.get_rank()
    pipeline = Pipeline(model, plan_of_two(model), micro_batches=MICRO)
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    own = named[f"blocks.{rank}.connections.0.norm.weight"]
    own.grad[0] = (3.0, 4.0)[rank]
    norm = pipeline.gradients.clip(named, 1.0)
    after = float(own.grad.norm())
    named["embedding.weight"].grad[0, 0] = 5.0  # held by both
    own.grad.zero_()
    return norm, after, pipeline.gradients.clip(named, 0.0)


def plan_of_two(model: Decoder, **options: Any) -> Plan:
    given = {"batch_size": BATCH, "seq_len": LENGTH, "state_dtype": "float64"}
    return plan_pipeline(model.cfg, 2, **{**given, **options})


def refused_where_plans_differ() -> str:
    """What a rank says that was started with another split than the other."""
    model = Case("additive").model(n_blocks=3)
    try:
        Pipeline(model, plan_of_two(model, counts=((1, 2), (2, 1))[dist.get_rank()]), micro_batches=MICRO)
    except InputError as error:
        return str(error)
    return "accepted"


def bfloat16_on_the_wire(depth: str, schedule: str = "gpipe") -> tuple[float, int, int]:
    """Relative error of all gradients when the state is sent in bfloat16; bytes sent so, and as it is."""
    alone, model = (Case(depth).model(torch.float32, n_blocks=BLOCKS) for _ in range(2))
    planned = plan_of_two(alone, state_dtype="float32", send_dtype="bfloat16", transport="full")
    exact = plan_of_two(alone, state_dtype="float32", transport="full")
    pipeline = Pipeline(model, planned, micro_batches=MICRO, schedule=schedule)
    _, expected = descend(alone, 0, False)
    _, found = descend(pipeline, 0, False)
    sent_as_planned(pipeline, 1)
    wrong = sum(float((found[n] - expected[n]).square().sum()) for n in found)
    size = sum(float(expected[n].square().sum()) for n in found)
    return (wrong / size) ** 0.5, planned.nbytes["full"], exact.nbytes["full"]


def trained(cfg: dict[str, Any], out: str, resume: bool = False) -> dict[str, Any]:
    """A training run over this world's processes."""
    return twoaxis.train(TrainConfig.from_dict(cfg), out, resume=resume)
