"""The pipeline of a training run, over the processes that differ along the grid's pipeline axis."""

from __future__ import annotations

import torch

from twoaxis.data import Batch
from twoaxis.errors import InputError
from twoaxis.model import Decoder
from twoaxis.parallel import Plan, check_dropout, check_schedule, plan_pipeline
from twoaxis.parallel.mesh import Mesh
from twoaxis.train.config import TrainConfig
from twoaxis.train.precision import Master, computing_in


def plan_of(cfg: TrainConfig, state_dtype: str | None = None) -> Plan:
    """The plan of the pipeline that a run asks for; state_dtype: of a float64 model."""
    if cfg.depth_loss:
        raise InputError(f"depth_loss={cfg.depth_loss}: a pipeline has no loss term of its own yet; use 0")
    check_dropout(cfg.model)
    check_schedule(cfg.pipeline_schedule, cfg.pipeline, cfg.pipeline_virtual, cfg.accumulation)
    return plan_pipeline(
        cfg.model,
        cfg.pipeline,
        cfg.pipeline_virtual,
        batch_size=cfg.batch_size,
        seq_len=cfg.seq_len,
        transport=cfg.pipeline_transport,
        counts=cfg.pipeline_split or None,
        send_dtype=None if cfg.pipeline_send == "state" else cfg.pipeline_send,
        state_dtype=state_dtype,
    )


class Pipelined:
    """The pipeline of a run. `model` loses what others hold."""

    def __init__(self, cfg: TrainConfig, model: Decoder, device: torch.device, mesh: Mesh) -> None:
        from twoaxis.parallel import Pipeline

        self.master: Master | None = None
        self.pipeline = Pipeline(
            model,
            plan_of(cfg, str(model.state_dtype).removeprefix("torch.")),
            micro_batches=cfg.accumulation,
            schedule=cfg.pipeline_schedule,
            group=mesh.group("pipeline"),
            device=device,
            computing=lambda: computing_in(cfg.precision, device),
            after_backward=self._collect,
        )

    def _collect(self) -> None:
        if self.master is not None:
            self.master.collect()

    def accumulate(self, master: Master, batches: list[Batch], n_targets: int) -> float:
        """As `session.accumulate`: the gradient in `master`; the summed loss over n_targets."""
        self.master = master
        tokens, targets = (torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "targets"))
        segments = [b.segments for b in batches if b.segments is not None]
        ids = torch.cat(segments) if segments else None
        return float(self.pipeline.step(tokens, targets, segments=ids, n_targets=n_targets))

    def holders(self, name: str) -> list[int]:
        """The places along the pipeline that hold a parameter."""
        return self.pipeline.plan.holders(name)

    def lent(self) -> frozenset[str]:
        """Parameters of blocks that earlier processes hold too, for sums that they push to their readers."""
        several = self.pipeline.gradients.shared.values()
        return frozenset(n for names in several for n in names if n.startswith("blocks."))
