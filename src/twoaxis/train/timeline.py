"""The schedule of a run's pipeline in time: in seconds on a machine, else in FLOPs."""

from __future__ import annotations

from twoaxis.cost import traced
from twoaxis.cost.hardware import Hardware
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.roofline import times
from twoaxis.cost.simulate import Timeline, simulate
from twoaxis.cost.stages import stage_pass
from twoaxis.cost.works import works
from twoaxis.errors import InputError
from twoaxis.parallel import Plan, Stage
from twoaxis.tape import Tape
from twoaxis.train.config import TrainConfig


def tape_of_run(cfg: TrainConfig) -> Tape | None:
    """A micro-batch's pass in the dtype that the run computes in; None where that is not known."""
    return traced(cfg.model, cfg.batch_size, cfg.seq_len, computed_in(cfg))


def computed_in(cfg: TrainConfig) -> str:
    """The dtype of products."""
    return "float32" if cfg.precision == "float32" else "bfloat16"


def timeline(
    cfg: TrainConfig, plan: Plan, t: Tape | None, mesh: Mesh | None = None, machine: Hardware | None = None
) -> Timeline:
    """One step, simulated. Without a machine passes take their FLOPs and links nothing; without a tape every block
    takes 1 forward and 2 backward. What is recomputed takes its share of blocks' time once more.

    Raises InputError for a machine whose links are not known.
    """
    mesh = mesh or Mesh(pp=plan.n_ranks)
    ahead, back = [], []
    for stage in plan.stages:
        first, second = _pass(cfg, t, plan, stage, mesh, machine)
        ahead.append(first)
        back.append(second + (first / cfg.saving.every if cfg.saving.recomputes else 0.0))
    links = []
    if machine is not None and plan.links:
        rate = machine.send_rate(mesh.devices)
        if rate is None:
            raise InputError(
                f"{machine.name} has no known bandwidth among {mesh.devices} devices; leave out --hardware, or put "
                "link_gb_per_s or network_gb_per_s into a machine's file"
            )
        links = [link.nbytes[link.takes] / rate for link in plan.links]
    schedule = cfg.pipeline_schedule if plan.n_ranks > 1 else "1f1b"
    return simulate(schedule, plan.n_ranks, plan.virtual, cfg.accumulation, ahead, back, links)


def _pass(
    cfg: TrainConfig, t: Tape | None, plan: Plan, stage: Stage, mesh: Mesh, machine: Hardware | None
) -> tuple[float, float]:
    """Forward and backward over one stage."""
    if t is None:
        return float(len(stage.blocks)), 2.0 * len(stage.blocks)
    part = stage_pass(t, stage.blocks, stage.index == 0, stage.index == len(plan.links))
    ahead, back = works(part, "fused")
    if machine is None:
        return float(sum(w.flops for w in ahead)), float(sum(w.flops for w in back))
    dtype, share = computed_in(cfg), float(mesh.tp)
    return (
        times(ahead, machine, dtype, share).on(machine),
        times(back, machine, dtype, share, cold=True).on(machine),
    )
