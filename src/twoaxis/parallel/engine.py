"""torch's pipeline stage, taught to use a rank's cache of depth and to count what it sends.

Schedules, links and buffers are torch.distributed.pipelining's. Only here are its internals touched: a stage
hands its module no micro-batch number, which the cache needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from twoaxis.parallel.cached import DepthCache
from twoaxis.parallel.plan import Link, Plan
from twoaxis.parallel.stage import StageModule
from twoaxis.parallel.wire import Wire
from twoaxis.types import DTYPES


class StateStage(PipelineStage):
    """A stage whose inputs are what it receives and what it takes from the cache.

    after_backward: called after each micro-batch's backward pass.
    """

    def __init__(
        self,
        module: StageModule,
        plan: Plan,
        device: torch.device,
        group: dist.ProcessGroup | None,
        cache: DepthCache,
        wire: Wire,
        after_backward: Callable[[], None],
    ) -> None:
        tokens = torch.empty(plan.batch_size, plan.seq_len, dtype=torch.long, device="meta")
        stage, entry, leave = module.stage, module.entry, module.exit
        logits = torch.empty(1, device="meta")  # never sent
        super().__init__(
            module,
            stage.index,
            len(plan.stages),
            device,
            input_args=(tokens,) if entry is None else _as_received(entry, module),
            output_args=(logits,) if leave is None else _as_received(leave, module),
            group=group,
        )
        self.plan_stage, self.cache, self.wire, self.after_backward = stage, cache, wire, after_backward
        self._made: dict[int, tuple[Tensor, ...]] = {}  # kept outputs with their graph, by micro-batch
        self._deposits: tuple[Tensor, ...] = ()

    def _get_recv_ops(self, recv_infos: Any) -> list[dist.P2POp]:
        """As torch's, into new buffers: they live as long as their micro-batch, not as long as the pipeline."""
        for info in recv_infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = torch.empty(
                    info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device
                )
        ops: list[dist.P2POp] = super()._get_recv_ops(recv_infos)
        return ops

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            _let_go(infos)
        return made

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            _let_go(infos)

    @property
    def _kept(self) -> list[str]:
        return [n for n in self.plan_stage.keeps if n not in self.plan_stage.receives]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _let_go(self.args_recv_info[fwd_chunk_id])
        grad = self.has_backward and torch.is_grad_enabled()
        for name, tensor in zip(self.plan_stage.receives, received, strict=True):
            if name in self.plan_stage.keeps:
                self.cache.put(fwd_chunk_id, name, tensor)
        taken = (self.cache.take(fwd_chunk_id, name, grad) for name in self.plan_stage.takes)
        return (*received, *taken)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch forward; what is kept goes into the cache instead of over the link."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        if self.is_last:  # backward starts from the loss: let go of the logits
            self.fwd_cache[fwd_chunk_id] = ((), inputs)
        if self._kept:
            made = outputs[len(self.plan_stage.sends) :]
            self._made[fwd_chunk_id] = made
            self.fwd_cache[fwd_chunk_id] = (outputs[: len(self.plan_stage.sends)], inputs)
            for name, tensor in zip(self._kept, made, strict=True):
                self.cache.put(fwd_chunk_id, name, tensor)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run one micro-batch backward, with what later stages of this rank have deposited."""
        made = self._made.pop(bwd_chunk_id, ())
        grads = [self.cache.collect(bwd_chunk_id, name) for name in self._kept]
        used = [(t, g) for t, g in zip(made, grads, strict=True) if g is not None]
        outputs, inputs = self.fwd_cache[bwd_chunk_id]
        self.fwd_cache[bwd_chunk_id] = ((*outputs, *(t for t, _ in used)), inputs)
        self._deposits = tuple(g.to(t.dtype) for t, g in used)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if kwargs.get("loss") is not None:
            kwargs[
                "loss"
            ].detach_()  # torch keeps it to the end of the step, and with it all that was received
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = self._to_send(bwd_chunk_id, self.bwd_cache[bwd_chunk_id])
        self.after_backward()

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _let_go(self.grad_recv_info[bwd_chunk_id])
        return (*received, *self._deposits)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's; the gradients of what was taken from the cache go back to it."""
        grads, groups = super().backward_maybe_with_nosync(*args, **kwargs)
        self._taken_grads = grads[len(self.plan_stage.receives) :][: len(self.plan_stage.takes)]
        return grads, groups

    def _to_send(self, micro: int, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of what was received, deposits added."""
        for name, grad in zip(self.plan_stage.takes, self._taken_grads, strict=True):
            self.cache.deposit(micro, name, grad)
        out = []
        for name, grad in zip(self.plan_stage.receives, grads, strict=True):
            more = self.cache.collect(micro, name) if name in self.plan_stage.keeps else None
            total = more if grad is None else grad if more is None else grad + more
            out.append(None if total is None else total.contiguous())
        return tuple(out)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, counted."""
        ops: list[dist.P2POp] = super().get_fwd_send_ops(fwd_chunk_id)
        self.wire.count(self.stage_index, "forward", ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As torch's, counted."""
        ops: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        self.wire.count(self.stage_index - 1, "backward", ops)
        return ops


def _let_go(recv_infos: Any) -> None:
    for info in recv_infos:
        if not info.is_root_arg:
            info.buffer = None


def _as_received(link: Link, module: StageModule) -> tuple[Tensor, ...]:
    """The tensors of a link without numbers."""
    dtype = None if link.dtype is None else DTYPES[link.dtype]
    return tuple(
        torch.empty(spec.shape, dtype=dtype or module.model.state_dtype, device="meta", requires_grad=True)
        for spec in link.sent.values()
    )
