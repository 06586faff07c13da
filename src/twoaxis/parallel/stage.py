"""One stage of a pipeline as a module: tensors in, its blocks, tensors out.

tokens ── embed, open ── blocks ── pack ──▶ link ──▶ unpack ── blocks ── ... ── close, head ── logits
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.errors import RunError
from twoaxis.model import Decoder
from twoaxis.parallel.plan import Link, Plan, Stage
from twoaxis.types import DTYPES, Context


class StageModule(nn.Module):
    """The part of `model` that one stage of a plan runs.

    Called with tokens (B, T) on the first stage, else with the tensors that it receives and then those that it
    takes from the rank's cache. Returns logits on the last stage, else what it sends and then what it keeps.
    computing: the context in which it computes, such as autocast.
    """

    def __init__(
        self,
        model: Decoder,
        plan: Plan,
        stage: Stage,
        computing: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.model, self.stage, self.computing = model, stage, computing
        self.entry: Link | None = plan.links[stage.index - 1] if stage.index else None
        self.exit: Link | None = plan.links[stage.index] if stage.index < len(plan.links) else None

    def forward(
        self, *inputs: Tensor, segments: Tensor | None = None, positions: Tensor | None = None
    ) -> Any:
        """See the class."""
        with self.computing(), self.model.saving.around(self.model, inputs[0].device):
            if self.model.recomputes and self.training and torch.is_grad_enabled():
                return checkpoint(self._run, inputs, segments, positions, use_reentrant=False)
            return self._run(inputs, segments, positions)

    def _run(self, inputs: tuple[Tensor, ...], segments: Tensor | None, positions: Tensor | None) -> Any:
        model, ctx = self.model, Context(segments, positions, None, self.model.depth_window)
        if self.entry is None:
            ctx = model.context(inputs[0], segments, positions)
            state = model.stream.open(model.embedding(inputs[0]).to(model.state_dtype), ctx)
        else:
            names = (*self.stage.receives, *self.stage.takes)
            named = {n: t.to(model.state_dtype) for n, t in zip(names, inputs, strict=True)}
            state = self.entry.boundary.unpack(named)
        for index in self.stage.blocks:
            state = model.saving.through(model.blocks[index], index, state, ctx)
        if self.exit is None:
            x = model.stream.close(state, ctx)
            return model.head(x.to(model.head.weight.dtype))
        named = self.exit.boundary.pack(model, state)
        sends = [_as_sent(named[n], self.exit, n) for n in self.stage.sends]
        kept = [named[n] for n in self._kept_outputs]
        return (*sends, *kept)

    @property
    def _kept_outputs(self) -> list[str]:
        """What is kept of what the stage makes; what it receives is kept as received."""
        return [n for n in self.stage.keeps if n not in self.stage.receives]


def _as_sent(tensor: Tensor, link: Link, name: str) -> Tensor:
    """Cast as the plan says; RunError where the shape is not the plan's."""
    spec = link.sent[name]
    if tuple(tensor.shape) != spec.shape:
        raise RunError(
            f"stage {link.index} would send {name} as {tuple(tensor.shape)} and the plan says {spec.shape}; "
            "micro-batches must have the plan's batch_size and seq_len"
        )
    dtype = tensor.dtype if link.dtype is None else DTYPES[link.dtype]
    return tensor.to(dtype).contiguous()


def let_go(model: Decoder, held: frozenset[str]) -> None:
    """Free every parameter that is not held here; names and modules of the others stay as they are."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            full = f"{prefix}.{name}" if prefix else name
            tied = full == "head.weight" and model.cfg.tie_embeddings
            if parameter is not None and ("embedding.weight" if tied else full) not in held:
                setattr(module, name, None)
