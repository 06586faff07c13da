"""A run before it is run: what each process would hold and send, and whether it fits. No weights, data, processes.

A copy of the model is divided over pp stages and tp slices (matrices of attention and MLP; the rest is on every slice).
Of dp copies each holds all of its weights, gradients and optimiser state, or, sharded, its dp-th part of them and,
while it runs a block, that block's weights whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from twoaxis.cost.hardware import Hardware
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.simulate import Timeline
from twoaxis.depth.history_spec import parse_history
from twoaxis.errors import InputError
from twoaxis.parallel import Plan, plan_pipeline
from twoaxis.train.config import TrainConfig
from twoaxis.train.pipelined import plan_of
from twoaxis.train.processes import check_division
from twoaxis.train.rank_needs import RankNeeds, rank_needs
from twoaxis.train.timeline import tape_of_run, timeline


@dataclass(frozen=True)
class DryRun:
    """The plan of the pipeline, what each of its processes needs, and the step's schedule in time."""

    plan: Plan
    mesh: Mesh
    ranks: tuple[RankNeeds, ...]
    line: Timeline

    def peak(self, sharded: bool) -> int:
        """Bytes of the process that needs most."""
        return max(rank.nbytes(sharded) for rank in self.ranks)


def dry_run(cfg: TrainConfig, mesh: Mesh | None = None, machine: Hardware | None = None) -> DryRun:
    """Count a run of `cfg`; its `pipeline` is pp, and without a mesh its other sizes are the mesh's. machine: whose
    speed the schedule is simulated at.

    Raises InputError for meshes that do not divide the model, for what a run over them refuses, and where the cost
    model does not know what is kept: methods without a trace, history="recompute" or, in a pipeline, in fewer bits,
    autocast, a chunked loss.
    """
    mesh = mesh or Mesh(dp=cfg.data_parallel, tp=cfg.tensor_parallel)
    mesh = dataclasses.replace(mesh, pp=cfg.pipeline)
    dataclasses.replace(mesh, pp=1).check(cfg.model, cfg.seq_len)
    check_division(dataclasses.replace(cfg, data_parallel=mesh.dp, tensor_parallel=mesh.tp))
    heads = cfg.model.n_kv_heads or cfg.model.n_heads
    if mesh.cp > 1 or heads % mesh.tp:
        raise InputError(f"mesh {mesh}: allowed is cp=1, and a tp that divides n_kv_heads={heads}")
    if cfg.precision == "autocast" or cfg.chunked_loss:
        raise InputError(
            "what autocast and a chunked loss keep is not counted: give --precision float32 or bf16_master, and no "
            "--chunked-loss"
        )
    t = tape_of_run(cfg)
    rounds = parse_history(cfg.model.history).dtype != "full"
    if t is None or t.again is not None or (rounds and cfg.pipeline > 1):
        why = cfg.model.depth_config().untraced if t is None else f"history={cfg.model.history!r}"
        raise InputError(f"what {cfg.model.depth} keeps for backward is not counted: {why}")
    plan = plan_of(cfg) if cfg.pipeline > 1 else _alone(cfg)
    line = timeline(cfg, plan, t, mesh, machine)
    return DryRun(plan, mesh, rank_needs(cfg, mesh, plan, t, line), line)


def _alone(cfg: TrainConfig) -> Plan:
    return plan_pipeline(cfg.model, 1, batch_size=cfg.batch_size, seq_len=cfg.seq_len)
