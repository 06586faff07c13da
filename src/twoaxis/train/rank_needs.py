"""What one process of a run holds at the peak and sends in a step, in bytes.

Parameters are counted on the meta device, what is kept for backward on the tape of the cost model, micro-batches under
way in the simulated schedule, states on their way in the pipeline's plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from twoaxis.cost.mesh import Mesh
from twoaxis.cost.schedules import peak
from twoaxis.cost.simulate import Timeline
from twoaxis.cost.stages import kept, sliced
from twoaxis.parallel import Link, Plan
from twoaxis.parallel.boundary import boundaries
from twoaxis.tape import Array, Tape
from twoaxis.train.config import TrainConfig
from twoaxis.train.weighed import Trained, Weighed


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """One process of a copy.

    parameters: numbers of this slice. shared: what a process trains of them where they are sharded over dp (weights,
    gradients, optimiser; the share of the process with most). gathered: then, whole weights that are together at once,
    pending: whole gradients that wait for the step's last micro-batch. activations,
    state: kept for backward by the micro-batches under way, of which `live` are stage passes; state: the residual
    state at block boundaries. recomputed: more while a block is computed again or brought back from the host, which
    then holds `host` bytes besides. sent: to other stages, slices and copies.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: tuple[int, ...]
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    shared: Trained
    gathered: int
    pending: int
    activations: int
    state: int
    recomputed: int
    host: int
    live: int
    sent: dict[str, int]

    def nbytes(self, sharded: bool = False) -> int:
        """All that it holds, with what is trained whole on each copy or sharded over them."""
        whole = self.weights + self.gradients + self.optimizer
        trained = self.shared.nbytes + self.gathered + self.pending if sharded else whole
        return trained + self.activations + self.state + self.recomputed


def rank_needs(cfg: TrainConfig, mesh: Mesh, plan: Plan, t: Tape, line: Timeline) -> tuple[RankNeeds, ...]:
    """Every process of one copy of the model."""
    weighed, divides = Weighed(cfg, mesh), mesh.dp > 1  # of one copy there are no shares
    one = MicroBatch(cfg, mesh, plan, t, weighed.kinds)
    found = []
    for rank, order in enumerate(line.orders):
        mine = [s for s in plan.stages if s.rank == rank]
        blocks = tuple(b for s in mine for b in s.blocks)
        total = [a + b for a, b in zip(one.activations, one.state, strict=True)]
        most = peak(order, total)
        own = weighed.trained(plan.held[rank])
        found.append(
            RankNeeds(
                rank=rank,
                stages=tuple(s.index for s in mine),
                blocks=blocks,
                parameters=own.numbers,
                weights=own.weights,
                gradients=own.gradients,
                optimizer=own.optimizer,
                shared=weighed.trained(plan.held[rank], plan) if divides else own,
                gathered=weighed.gathered(plan, rank) if divides else 0,
                pending=4 * own.numbers if divides and not plan.links and cfg.accumulation > 1 else 0,
                activations=round(sum(n * x for n, x in zip(most, one.activations, strict=False))),
                state=round(sum(n * x for n, x in zip(most, one.state, strict=False))),
                recomputed=round(max(one.again[s.index] for s in mine)),
                host=round(sum(n * x for n, x in zip(peak(order, one.host), one.host, strict=False))),
                live=line.live[rank],
                sent=_sent(cfg, mesh, plan, rank, weighed.cuts_in(blocks), 4 * own.numbers, t.itemsize),
            )
        )
    return tuple(found)


class MicroBatch:
    """What the stages of a plan keep of one micro-batch, in bytes on one slice of tensors, by stage.

    kinds: of cores that are sliced; what is inside others, those inside `parallel` among them, counts as whole.
    """

    def __init__(self, cfg: TrainConfig, mesh: Mesh, plan: Plan, t: Tape, kinds: frozenset[str]) -> None:
        pulled = boundaries(cfg.model, cfg.batch_size, cfg.seq_len)[1]
        inside = sliced(t, kinds) if mesh.tp > 1 else frozenset[Array]()

        def nbytes(arrays: frozenset[Array]) -> float:
            return sum(x.nbytes / (mesh.tp if x in inside else 1) for x in arrays)

        shares = mesh.dp > 1 and cfg.sharding == "fsdp"  # then no state is made again from other blocks
        self.activations, self.state, self.again, self.host = [], [], [], []
        for stage in plan.stages:
            entry = plan.links[stage.index - 1].boundary if stage.index else None
            arrays = dict(
                zip(pulled[stage.blocks.start].specs, t.boundaries[stage.blocks.start][1], strict=True)
            )
            absent = {x.root for name, x in arrays.items() if entry is not None and name not in entry.specs}
            taken = {arrays[name].root for name in stage.takes}  # an earlier stage of this rank keeps them
            last = stage.index == len(plan.links)
            one = kept(
                t,
                stage.blocks,
                first=stage.index == 0,
                last=last,
                saved=cfg.saving.saved,
                every=cfg.saving.every,
                absent=frozenset(absent),
                hands_on=last or not _cast(plan, plan.links[stage.index]),
                loop=not plan.links and cfg.saving.saved == "all" and not shares,
            )
            self.activations.append(nbytes(one.arrays - one.state))
            self.state.append(nbytes(one.state - taken) + _beside(plan, stage.index))
            self.again.append(nbytes(one.again))
            self.host.append(nbytes(one.host))


def _beside(plan: Plan, stage: int) -> int:
    """Bytes that a stage gets or hands on and that no pass has: sums in place of sources, other dtypes on the way."""
    around = [link for link in plan.links if link.index in (stage - 1, stage)]
    cast = sum(k.nbytes[k.takes] for k in around if _cast(plan, k))
    sums = [spec for k in around for name, spec in k.boundary.specs.items() if ".sum." in name]
    return cast + sum(spec.nbytes for spec in sums)


def _cast(plan: Plan, link: Link) -> bool:
    return link.dtype not in (None, plan.state_dtype)


def _sent(
    cfg: TrainConfig,
    mesh: Mesh,
    plan: Plan,
    rank: int,
    cores: int,
    gradients: int,
    itemsize: int,
) -> dict[str, int]:
    """Bytes that one process sends in a step: states and their gradients over links; sums over tp after each sliced
    core, and before it backward; gradients' sums over dp. Sums go round in rings."""
    m = cfg.accumulation
    tokens = cfg.batch_size * cfg.seq_len * cfg.model.d_model * itemsize
    return {
        "pipeline": m
        * sum(link.nbytes[link.takes] for link in plan.links for end in link.ranks if end == rank),
        "tensor": 2 * m * cores * _ring(tokens, mesh.tp),
        "data": _ring(gradients, mesh.dp),
    }


def _ring(nbytes: int, parts: int) -> int:
    return 2 * (parts - 1) * nbytes // parts
