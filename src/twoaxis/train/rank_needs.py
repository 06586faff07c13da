"""What one process of a run holds at the peak and sends in a step, in bytes.

Parameters are counted on the meta device, what is kept for backward on the tape of the cost model, micro-batches under
way in the simulated schedule, states on their way in the pipeline's plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twoaxis.cost.mesh import Mesh
from twoaxis.cost.schedules import peak
from twoaxis.cost.simulate import Timeline
from twoaxis.cost.stages import kept, sliced
from twoaxis.model import Decoder
from twoaxis.parallel import Link, Plan
from twoaxis.parallel.boundary import boundaries
from twoaxis.tape import Array, Tape
from twoaxis.train.config import TrainConfig
from twoaxis.train.optimizer import group_of

SLICED = frozenset({"attention", "mlp"})  # cores whose matrices tp divides


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """One process of a copy.

    parameters: numbers of this slice. gathered: of a block's whole weights, where they are sharded. activations,
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
    gathered: int
    activations: int
    state: int
    recomputed: int
    host: int
    live: int
    sent: dict[str, int]

    def nbytes(self, parts: int = 1) -> int:
        """All that it holds, with what is trained sharded into so many parts."""
        trained = self.weights + self.gradients + self.optimizer
        trained = trained if parts == 1 else -(-trained // parts) + self.gathered
        return trained + self.activations + self.state + self.recomputed


def rank_needs(cfg: TrainConfig, mesh: Mesh, plan: Plan, t: Tape, line: Timeline) -> tuple[RankNeeds, ...]:
    """Every process of one copy of the model."""
    weighed, one = Weighed(cfg, mesh), MicroBatch(cfg, mesh, plan, t)
    found = []
    for rank, order in enumerate(line.orders):
        mine = [s for s in plan.stages if s.rank == rank]
        blocks = tuple(b for s in mine for b in s.blocks)
        total = [a + b for a, b in zip(one.activations, one.state, strict=True)]
        most = peak(order, total)
        numbers, optimizer = weighed.trained(plan.held[rank])
        found.append(
            RankNeeds(
                rank=rank,
                stages=tuple(s.index for s in mine),
                blocks=blocks,
                parameters=numbers,
                weights=weighed.width * numbers,
                gradients=weighed.width * numbers,
                optimizer=optimizer,
                gathered=weighed.largest(blocks),
                activations=round(sum(n * x for n, x in zip(most, one.activations, strict=False))),
                state=round(sum(n * x for n, x in zip(most, one.state, strict=False))),
                recomputed=round(max(one.again[s.index] for s in mine)),
                host=round(sum(n * x for n, x in zip(peak(order, one.host), one.host, strict=False))),
                live=line.live[rank],
                sent=_sent(cfg, mesh, plan, rank, blocks, 4 * numbers, t.itemsize),
            )
        )
    return tuple(found)


class MicroBatch:
    """What the stages of a plan keep of one micro-batch, in bytes on one slice of tensors, by stage."""

    def __init__(self, cfg: TrainConfig, mesh: Mesh, plan: Plan, t: Tape) -> None:
        pulled = boundaries(cfg.model, cfg.batch_size, cfg.seq_len)[1]
        inside = sliced(t, SLICED) if mesh.tp > 1 else frozenset[Array]()

        def nbytes(arrays: frozenset[Array]) -> float:
            return sum(x.nbytes / (mesh.tp if x in inside else 1) for x in arrays)

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
                loop=not plan.links and cfg.saving.saved == "all",
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


class Weighed:
    """The model's parameters on the meta device: numbers and bytes of some of them, on one slice.

    width: bytes of a weight, and of a gradient: a float32 master and perhaps a bfloat16 copy.
    """

    def __init__(self, cfg: TrainConfig, mesh: Mesh) -> None:
        self.cfg, self.tp = cfg, mesh.tp
        self.model: Decoder = boundaries(cfg.model, cfg.batch_size, cfg.seq_len)[0]
        self.width = 6 if cfg.precision == "bf16_master" else 4
        rows = cfg.model.block_configs()
        self.kinds = {(b, i): core.kind for b, row in enumerate(rows) for i, core in enumerate(row)}

    def numbers(self, name: str, shape: tuple[int, ...]) -> int:
        """Of one parameter, on one slice."""
        at = name.split(".")
        core = at[2] == "cores" if at[0] == "blocks" else False
        cut = core and self.kinds[int(at[1]), int(at[3])] in SLICED and len(shape) > 1
        return math.prod(shape) // (self.tp if cut else 1)

    def trained(self, held: frozenset[str]) -> tuple[int, int]:
        """Numbers that a rank trains; bytes of the optimiser: moments, and AdamW's step counts."""
        rules = self.model.param_rules()
        numbers = optimizer = 0
        for name, parameter in self.model.named_parameters():
            if name in held:
                count = self.numbers(name, tuple(parameter.shape))
                muon = group_of(name, parameter, rules[name], self.cfg.optimizer)[0] == "muon"
                numbers += count
                optimizer += 4 * count if muon else 8 * count + 4
        return numbers, optimizer

    def largest(self, blocks: tuple[int, ...]) -> int:
        """Bytes of the largest block's weights as they are computed with."""
        sizes = dict.fromkeys(blocks, 0)
        for name, parameter in self.model.named_parameters():
            block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
            if block in sizes:
                sizes[block] += self.numbers(name, tuple(parameter.shape))
        return max(sizes.values(), default=0) * (2 if self.width == 6 else 4)


def _sent(
    cfg: TrainConfig,
    mesh: Mesh,
    plan: Plan,
    rank: int,
    blocks: tuple[int, ...],
    gradients: int,
    itemsize: int,
) -> dict[str, int]:
    """Bytes that one process sends in a step: states and their gradients over links; sums over tp after each sliced
    core, and before it backward; gradients' sums over dp. Sums go round in rings."""
    rows, m = cfg.model.block_configs(), cfg.accumulation
    cores = sum(core.kind in SLICED for b in blocks for core in rows[b])
    tokens = cfg.batch_size * cfg.seq_len * cfg.model.d_model * itemsize
    return {
        "pipeline": m
        * sum(link.nbytes[link.takes] for link in plan.links for end in link.ranks if end == rank),
        "tensor": 2 * m * cores * _ring(tokens, mesh.tp),
        "data": _ring(gradients, mesh.dp),
    }


def _ring(nbytes: int, parts: int) -> int:
    return 2 * (parts - 1) * nbytes // parts
