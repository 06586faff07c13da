"""Train a model as a pipeline: one process per rank, each with its stages' part of the model."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from twoaxis.cache import document_positions
from twoaxis.errors import InputError
from twoaxis.model import Decoder, token_loss
from twoaxis.parallel.cached import DepthCache
from twoaxis.parallel.engine import StateStage
from twoaxis.parallel.gradients import Gradients
from twoaxis.parallel.plan import Plan
from twoaxis.parallel.schedule import check_dropout, check_schedule
from twoaxis.parallel.stage import StageModule, let_go
from twoaxis.parallel.wire import Wire


class Pipeline:
    """A pipeline of `model` over the processes of `group`, of which this is one.

    Every process makes the same model (the same seed or file) and the same plan, and gives them here; parameters
    that its stages do not need are freed in place, and the others keep their names. `step` leaves in them the
    gradients that one process would find.

    schedule: "gpipe" (all forward, then all backward), "1f1b", or "interleaved" (1F1B over several stages per
    rank; "gpipe" takes several too). device: where it will compute, of a model that
    has no numbers yet. computing: the context of every forward pass, such as autocast.
    after_backward: called after every backward pass of a micro-batch.

    Raises InputError for what does not fit, on every rank alike, before anything is sent.
    """

    def __init__(
        self,
        model: Decoder,
        plan: Plan,
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        computing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        if not dist.is_initialized():
            raise InputError(
                "a Pipeline needs processes that know each other: torch.distributed.init_process_group"
            )
        rank = dist.get_rank(group)
        check_schedule(schedule, plan.n_ranks, plan.virtual, micro_batches)
        if plan.n_ranks != dist.get_world_size(group):
            raise InputError(f"a plan for {plan.n_ranks} ranks and {dist.get_world_size(group)} processes")
        self.plan = plan
        self.model, self.micro_batches, self.group = model, micro_batches, group
        self.device = device or model.stream.norm.weight.device
        self._check_model(schedule)
        let_go(model, self.plan.held[rank])
        self.gradients, self.cache, self.wire = Gradients(self.plan, group), DepthCache(), Wire()
        self.mine = [stage for stage in self.plan.stages if stage.rank == rank]
        self.stages = [
            StateStage(
                StageModule(model, self.plan, stage, computing),
                self.plan,
                self.device,
                group,
                self.cache,
                self.wire,
                after_backward,
            )
            for stage in self.mine
        ]
        self.is_first, self.is_last = self.stages[0].is_first, self.stages[-1].is_last
        self._targets = 1
        self.schedule = _schedule(schedule, self.stages, micro_batches, self._loss)

    def step(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        n_targets: int | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; the mean loss over targets that are not -100, everywhere.

        tokens, targets, segments (micro_batches * batch_size, T), the same on every rank, in the order of the
        micro-batches; positions also (T,). Gradients are added to what the parameters have; those of
        parameters that several ranks hold are summed by `sum_shared`, once all of a step's calls are done.
        n_targets: what the summed loss is divided by where these tokens are not all of the step's.
        """
        self._check(tokens, targets)
        if segments is not None and positions is None:
            positions = document_positions(segments)
        if positions is not None:
            positions = positions.expand(tokens.shape)
        self._targets = int((targets != -100).sum()) if n_targets is None else n_targets
        given = {"segments": segments, "positions": positions}
        more = {name: t.to(self.device) for name, t in given.items() if t is not None}
        losses: list[Tensor] = []
        self.cache.clear()
        self.schedule.step(
            *([tokens.to(self.device)] if self.is_first else []),
            target=targets.to(self.device) if self.is_last else None,
            losses=losses,
            return_outputs=False,
            **more,
        )
        assert len(self.cache) == 0, "an entry of the cache outlived its micro-batch"
        dtype = torch.promote_types(self.model.state_dtype, torch.float32)
        loss = sum((x.detach() for x in losses), torch.zeros((), dtype=dtype, device=self.device))
        return self.gradients.from_last(loss.to(dtype))

    def sum_shared(self) -> None:
        """Sum the gradients of parameters that several ranks hold; call it once per optimiser step."""
        self.gradients.sum_shared(dict(self.model.named_parameters()))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the mean over all targets of the step."""
        return token_loss(logits, targets) / max(self._targets, 1)

    def _check(self, tokens: Tensor, targets: Tensor) -> None:
        plan = self.plan
        shape = (self.micro_batches * plan.batch_size, plan.seq_len)
        for name, tensor in (("tokens", tokens), ("targets", targets)):
            if tuple(tensor.shape) != shape:
                raise InputError(
                    f"{name} {tuple(tensor.shape)}: this pipeline was made for {shape}, {self.micro_batches} "
                    f"micro-batches of ({plan.batch_size}, {plan.seq_len})"
                )

    def _check_model(self, schedule: str) -> None:
        """InputError on every rank for another model, or where plans differ: nobody waits for ever."""
        plan, dtype = self.plan, str(self.model.state_dtype).removeprefix("torch.")
        if (self.model.cfg, dtype) != (plan.cfg, plan.state_dtype):
            raise InputError(
                f"the plan is for {plan.cfg.depth} with states in {plan.state_dtype}, another model"
            )
        check_dropout(self.model.cfg)
        text = repr((plan.cfg, plan.stages, [link.sent for link in plan.links], self.micro_batches, schedule))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        both = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self.group)
        if both.tolist() != [digest, -digest]:
            raise InputError(
                "the ranks of this pipeline have different plans; start all with the same options"
            )


def _schedule(name: str, stages: list[StateStage], micro_batches: int, loss: Any) -> Any:
    given: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), **given)
    if name == "1f1b":
        return Schedule1F1B(stages[0], **given)
    return ScheduleGPipe(stages[0], **given) if len(stages) == 1 else ScheduleLoopedBFS(list(stages), **given)
