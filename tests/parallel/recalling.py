"""A method whose last block reads a state of the first stage, in some micro-batches only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import twoaxis
from configurations import VOCAB
from parallel.cases import BATCH, CLOSE, LENGTH, MICRO, data
from twoaxis import Decoder
from twoaxis.depth import Connection, DepthConfig, PlainStream
from twoaxis.model import token_loss
from twoaxis.parallel import Pipeline, plan_pipeline
from twoaxis.spec import register
from twoaxis.types import Reads


class Recalling(Connection):
    """x + y; the last block also adds the embeddings, in micro-batches where a document has the id 7."""

    equation = "test"
    source = "test"

    class Config(DepthConfig):
        """No options."""

    def __init__(self, cfg: Any, layout: Any, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.last = (block, index) == (layout.n_blocks - 1, 1)

    def read(self, state: Any, ctx: Any) -> tuple[Reads, None]:
        return Reads(state["stream"]), None

    def write(self, state: Any, carry: None, y: Tensor, ctx: Any) -> Any:
        x = state["stream"] + y
        if self.last and ctx.segments is not None and bool((ctx.segments == 7).any()):
            x = x + state["early"].tanh()
        return {**state, "stream": x}

    @classmethod
    def stream(cls, cfg: Any, layout: Any) -> PlainStream:
        return RecallingStream(layout)


class RecallingStream(PlainStream):
    def open(self, x: Tensor, ctx: Any) -> Any:
        return {"stream": x, "early": 2 * x}

    def close(self, state: Any, ctx: Any) -> Tensor:
        return self.norm(state["stream"])

    def unchanging(self, name: str) -> bool:
        return name == "early"

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, Any]:
        return dict.fromkeys(("stream", "early"), self.spec_of(batch_size, seq_len))


def used_far_away(schedule: str, virtual: int = 1) -> None:
    """A state of the first stage, read by the last alone, and only in some micro-batches, gets its gradient."""
    if "recalling" not in twoaxis.methods("depth"):
        register("depth", "recalling")(Recalling)
    cfg = twoaxis.ModelConfig(vocab_size=VOCAB, d_model=12, n_heads=2, n_blocks=8, depth="recalling")
    n_ranks = dist.get_world_size()
    alone, model = (Decoder(cfg).double() for _ in range(2))
    model.load_state_dict(alone.state_dict())
    for parameter in alone.parameters():
        dist.broadcast(parameter.data, 0)
    model.load_state_dict(alone.state_dict())
    given = {"batch_size": BATCH, "seq_len": LENGTH, "state_dtype": "float64"}
    pipeline = Pipeline(
        model, plan_pipeline(cfg, n_ranks, virtual, **given), micro_batches=MICRO, schedule=schedule
    )
    for step in range(3):
        tokens, targets, ids = data(step, segments=True)
        assert ids is not None
        ids[BATCH * (step + 1)] = 7  # one micro-batch uses it, the others do not
        alone.zero_grad()
        model.zero_grad()
        for rows in torch.arange(MICRO * BATCH).split(BATCH):
            logits = alone(tokens[rows], segments=ids[rows])
            (token_loss(logits, targets[rows]) / (targets != -100).sum()).backward()
        pipeline.step(tokens, targets, segments=ids)
        pipeline.sum_shared()
        every = {n: p.grad for n, p in alone.named_parameters()}
        mine = {n: p.grad for n, p in model.named_parameters()}
        torch.testing.assert_close(mine, {n: every[n] for n in mine}, **CLOSE)
