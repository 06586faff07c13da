"""What the stages of a real pipeline do and hold, to be compared with what was simulated."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

from parallel.cases import BATCH, LENGTH
from twoaxis.cost.schedules import actions
from twoaxis.model import Decoder, ModelConfig
from twoaxis.ops import choice
from twoaxis.parallel import Pipeline
from twoaxis.train import TrainConfig
from twoaxis.train.dry_run import dry_run
from twoaxis.train.pipelined import plan_of


class Saved:
    """A tensor that autograd keeps, as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Watch:
    """Records the passes of a pipeline's stages, and the most that they hold between two of them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.order = pipeline, list[tuple[str, int, int]]()
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.own = {_place(p) for p in pipeline.model.parameters()}
        self.live, self.nbytes = 0, 0
        self.inputs: list[weakref.ref[Tensor]] = []  # of blocks: recomputation holds on to them
        for block in pipeline.model.blocks if pipeline.model.checkpointing else ():
            block.register_forward_pre_hook(self._enter)
        for stage in pipeline.stages:
            stage.forward_one_chunk = self._told("F", stage, stage.forward_one_chunk)
            stage.backward_one_chunk = self._told("B", stage, stage.backward_one_chunk)

    def _told(self, way: str, stage: Any, run: Any) -> Any:
        def told(micro: int, *args: Any, **kwargs: Any) -> Any:
            self._look()
            self.order.append((way, stage.stage_index, micro))
            return run(micro, *args, **kwargs)

        return told

    def _enter(self, block: Any, args: tuple[Any, ...]) -> None:
        self.inputs += map(weakref.ref, pytree.tree_leaves(args[0]))

    def _look(self) -> None:
        states = [
            t for s in self.pipeline.stages for both in s.fwd_cache.values() for part in both for t in part
        ]
        inputs = [ref() for ref in self.inputs]
        held: dict[int, int] = {}
        for tensor in (*states, *inputs, *(one.tensor for one in self.saved)):
            if isinstance(tensor, Tensor) and _place(tensor) not in self.own:
                held[_place(tensor)] = _size(tensor)
        self.nbytes = max(self.nbytes, sum(held.values()))
        self.live = max(self.live, sum(len(s.fwd_cache) for s in self.pipeline.stages))

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        def pack(tensor: Tensor) -> Saved:
            one = Saved(tensor)
            self.saved.add(one)
            return one

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor)
        with choice.requesting("plain"), hooks:
            self.pipeline.step(tokens, targets)


def _place(x: Tensor) -> int:
    """Token and target rows of all micro-batches share one storage, of which a micro-batch counts its own."""
    return x.untyped_storage().data_ptr() if x.is_floating_point() else x.data_ptr()


def _size(x: Tensor) -> int:
    return x.untyped_storage().nbytes() if x.is_floating_point() else x.numel() * x.element_size()


def simulated(depth: str, micro_batches: int, checkpointing: bool = False, **options: Any) -> dict[str, Any]:
    """Run a step and simulate it: passes, live micro-batches, bytes sent and parameters are equal.

    Returns the bytes that are held at the peak, and those that the dry run has counted.
    """
    given = {"pipeline": dist.get_world_size(), "accumulation": micro_batches, "seq_len": LENGTH}
    model = ModelConfig(vocab_size=37, d_model=24, n_heads=2, n_blocks=5, depth=depth)
    cfg = TrainConfig(
        model=model, batch_size=BATCH, checkpointing=checkpointing, device="cpu", **given, **options
    )
    torch.manual_seed(0)
    whole = Decoder(model)
    whole.checkpointing = checkpointing
    plan = plan_of(cfg)
    pipeline = Pipeline(whole, plan, micro_batches=micro_batches, schedule=cfg.pipeline_schedule)
    tokens, targets = torch.randint(37, (2, micro_batches * BATCH, LENGTH))
    watch = Watch(pipeline)
    watch.step(tokens, targets)
    needs = dry_run(cfg).ranks[pipeline.gradients.rank]
    expected = actions(cfg.pipeline_schedule, plan.n_ranks, plan.virtual, micro_batches)[needs.rank]
    assert watch.order == [tuple(action) for action in expected]
    assert watch.live == needs.live
    sent = sum(pipeline.wire.nbytes.values())
    assert sent == needs.sent["pipeline"]
    numbers = sum(p.numel() for p in whole.parameters())
    assert numbers == needs.parameters
    return {"held": watch.nbytes, "counted": needs.activations + needs.state}
