"""One row of the adviser's table: a point of the plane, what it costs here and what is known of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from twoaxis.cost.evidence import Result, about
from twoaxis.cost.fit import Memory, memory
from twoaxis.cost.hardware import Hardware
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.roofline import Step, predict, tape_of
from twoaxis.cost.sizes import with_methods
from twoaxis.cost.total import cost
from twoaxis.model.config import ModelConfig
from twoaxis.types import Cost


@dataclass(frozen=True)
class Point:
    """A depth method, and sublayers put before a block's own."""

    depth: str = "additive"
    before: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As in a legend: "ddl + short_swa(window=64)"."""
        local = " + ".join(self.before)
        return local if local and self.depth == "additive" else " + ".join(filter(None, (self.depth, local)))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A point's counts and predictions at one load and layout, and what has been published and measured of it.

    overhead: of the step's time over the standard model's. checkpointing: blocks had to be recomputed.
    own: measured results of `--runs`, each {"difference": bits per byte to its baseline, "words": a line}.
    """

    point: Point
    cost: Cost
    step: Step
    overhead: float
    memory: Memory
    fits: bool
    checkpointing: bool
    start: str
    evidence: tuple[Result, ...] = ()
    own: tuple[dict[str, Any], ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        held = self.memory.checkpointed if self.checkpointing else self.memory.activations
        return {
            "name": self.point.name,
            "depth": self.point.depth,
            "before": list(self.point.before),
            "parameters": self.cost.parameters,
            "flops": self.cost.flops,
            "step": dataclasses.asdict(self.step) | {"bound": self.step.bound},
            "overhead": self.overhead,
            "device_bytes": self.memory.model + held,
            "fits": self.fits,
            "checkpointing": self.checkpointing,
            "decode_state_bytes": self.cost.decode_state_bytes,
            "sent_bytes": self.step.sent_bytes,
            "standard_start": self.start,
            "evidence": [r.to_dict() for r in self.evidence],
            "own": list(self.own),
        }


def row(
    model: ModelConfig,
    point: Point,
    machine: Hardware,
    load: Load,
    mesh: Mesh,
    results: list[Result],
    own: list[dict[str, Any]],
    base: Row | None = None,
) -> Row:
    """The row of a point; `base` is the standard model's (None: this is it)."""
    cfg = with_methods(model, point.depth, *point.before)
    total = cost(cfg, load.batch_size, load.seq_len, dtype=load.dtype)
    t = tape_of(cfg, load)
    need = memory(t, load, mesh, total.parameters, total.decode_state_bytes)
    room = None if machine.memory_gb is None else 1e9 * machine.memory_gb
    again = load.checkpointing or not need.fits(room, False)
    again = again and not load.decoding
    step = predict(cfg, machine, dataclasses.replace(load, checkpointing=again), mesh, t)
    found = [r for name in (point.depth, *point.before) for r in about(results, name)]
    return Row(
        point=point,
        cost=total,
        step=step,
        overhead=step.seconds / base.step.seconds - 1 if base else 0.0,
        memory=need,
        fits=need.fits(room, again),
        checkpointing=again,
        start="no" if point.before else cfg.depth_config().standard_start(),
        evidence=tuple(found),
        own=tuple(
            r
            for r in own
            if r["depth"] == cfg.depth
            and len(r["local"]) == len(point.before)
            and all(a.split("(")[0] == b.split("(")[0] for a, b in zip(r["local"], point.before, strict=True))
        ),
    )
