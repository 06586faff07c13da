"""What a process trains: numbers and bytes of parameters on the meta device, as slices and shares divide them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from twoaxis.cost.mesh import Mesh
from twoaxis.model import Decoder
from twoaxis.parallel import Plan
from twoaxis.parallel.boundary import boundaries
from twoaxis.parallel.tensor import divided
from twoaxis.train.config import TrainConfig
from twoaxis.train.optimizer import group_of


class Trained(NamedTuple):
    """Numbers that are trained, and bytes: their weights, gradients, and the optimiser.

    Gradients of bf16_master are a micro-batch's own, in bfloat16, beside their sums in float32: at most so much where a
    step has one micro-batch.
    """

    numbers: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


class Weighed:
    """The model's parameters on the meta device: numbers and bytes of some of them, on one slice.

    kinds: the kinds of cores that tp divides, all of that kind. cuts: the cores that it divides, by name.
    """

    def __init__(self, cfg: TrainConfig, mesh: Mesh) -> None:
        self.cfg, self.mesh = cfg, mesh
        self.model: Decoder = boundaries(cfg.model, cfg.batch_size, cfg.seq_len)[0]
        self.low = cfg.precision == "bf16_master"
        self.shapes = {n: tuple(p.shape) for n, p in self.model.named_parameters()}
        self.cuts: dict[str, Any] = {}
        rows = cfg.model.block_configs()
        named = {
            f"blocks.{b}.cores.{i}": core.kind for b, row in enumerate(rows) for i, core in enumerate(row)
        }
        if mesh.tp > 1:
            with torch.device("meta"):
                model = Decoder(cfg.model)
            self.cuts = divided(model, mesh.tp)
            for name, style in self.cuts.items():
                style.divide(model.get_submodule(name), 0)
            self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        whole = {kind for name, kind in named.items() if name not in self.cuts}
        self.kinds = frozenset(named.values()) - whole

    def cuts_in(self, blocks: tuple[int, ...]) -> int:
        """How many cores of these blocks tp divides."""
        return sum(int(name.split(".")[1]) in blocks for name in self.cuts)

    def trained(self, held: frozenset[str], plan: Plan | None = None) -> Trained:
        """What a rank trains: these parameters, of a plan's pipeline sharded over dp."""
        rules = self.model.param_rules()
        numbers = optimizer = 0
        for name, parameter in self.model.named_parameters():
            if name in held:
                shape = self.shapes[name]
                count = math.prod(shape) if plan is None else self._share(name, plan)
                muon = group_of(name, parameter, rules[name], self.cfg.optimizer)[0] == "muon"
                numbers += count
                optimizer += 4 * count if muon else 8 * count + 4
        width = 6 if self.low and plan is None else 4  # float32 masters; FSDP keeps no bfloat16 copies
        return Trained(numbers, width * numbers, width * numbers, optimizer)

    def _divides(self, name: str, plan: Plan) -> bool:
        """Whether FSDP shards a parameter (`parallel/replicas.py`)."""
        if plan.links and name.startswith("stream."):
            return name == "stream.norm.weight"
        lent = name.startswith("blocks.") and len(plan.holders(name)) > 1
        return len(self.shapes[name]) > 0 and not lent

    def _share(self, name: str, plan: Plan) -> int:
        """Numbers of a parameter on the process that has most of it."""
        shape = self.shapes[name]
        if not self._divides(name, plan):
            return math.prod(shape)
        return -(-shape[0] // self.mesh.dp) * math.prod(shape[1:])

    def gathered(self, plan: Plan, rank: int) -> int:
        """Bytes of the whole weights that FSDP has together at once: the largest block's, and without a pipeline
        those around the blocks; rows are filled up to equal shares."""
        sizes: dict[str, int] = {}
        for name in plan.held[rank]:
            if self._divides(name, plan):
                unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else name.split(".")[0]
                sizes[unit] = sizes.get(unit, 0) + self._share(name, plan) * self.mesh.dp
        ends = [n for unit, n in sizes.items() if not unit.startswith("blocks.")]
        blocks = [n for unit, n in sizes.items() if unit.startswith("blocks.")]
        numbers = max([*blocks, *ends]) if plan.links else sum(ends) + max(blocks)
        return numbers * (2 if self.low else 4)
