"""`twoaxis train --dry-run`: what a run would hold and send on each process, and whether it fits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from twoaxis.cost.hardware import Hardware
from twoaxis.errors import InputError
from twoaxis.train import TrainConfig

SIZES = {"1b": "llama-1b", "8b": "llama-8b", "70b": "llama-70b"}
PARTS = ("weights", "gradients", "optimizer", "activations", "state", "recomputed")


def model_of(name: str) -> dict[str, Any]:
    """The fields of a model by name: 1b, 8b, 70b, or as `twoaxis advise --model` knows it."""
    from twoaxis.cost.sizes import size, sizes

    if name.lower() not in {*SIZES, *sizes()} and not Path(name).exists():
        raise InputError(
            f"--size {name}: allowed is {', '.join([*SIZES, *sizes()])}, or a saved model's folder"
        )
    return size(SIZES.get(name.lower(), name)).model.to_dict()


def show_dry_run(
    cfg: TrainConfig, mesh_text: str, machine_name: str | None, memory_gb: float | None, as_json: bool
) -> int:
    """Print the dry run of `cfg`."""
    from twoaxis.cost.hardware import hardware
    from twoaxis.cost.mesh import Mesh

    if memory_gb is not None and not memory_gb > 0:
        raise InputError(f"--memory-gb {memory_gb:g}: allowed is a number above 0")
    mesh = Mesh.parse(mesh_text)
    sizes = {"dp": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline"}
    for axis, name in sizes.items():
        own, asked = getattr(cfg, name), getattr(mesh, axis)
        if own != 1 and f"{axis}=" in mesh_text:
            raise InputError(f"--mesh {mesh_text} and --{name.replace('_', '-')} {own}: give one of them")
        mesh = dataclasses.replace(mesh, **{axis: max(own, asked)})
    cfg = dataclasses.replace(cfg, pipeline=mesh.pp)
    machine = hardware(machine_name) if machine_name else None
    told = described(cfg, mesh, machine, memory_gb)
    print(json.dumps(told, indent=2) if as_json else _text(told))
    return 0


def described(
    cfg: TrainConfig, mesh: Any, machine: Hardware | None, memory_gb: float | None
) -> dict[str, Any]:
    """The dry run as plain data. bytes: whole, every copy has all of its part; sharded, its dp-th."""
    from twoaxis.train.dry_run import dry_run

    found = dry_run(cfg, mesh, machine)
    room = memory_gb if memory_gb is not None else machine.memory_gb if machine else None
    room = None if room is None else 1e9 * room
    ways = {"whole": False, "sharded": True}
    return {
        "depth": cfg.model.depth,
        "precision": cfg.precision,
        "mesh": {k: getattr(found.mesh, k) for k in ("dp", "tp", "pp", "cp")},
        "processes": found.mesh.devices,
        "virtual": cfg.pipeline_virtual,
        "schedule": cfg.pipeline_schedule,
        "transport": found.plan.transport,
        "micro_batches": cfg.accumulation,
        "micro_batch": [cfg.batch_size, cfg.seq_len],
        "hardware": machine.name if machine else None,
        "seconds": found.line.seconds if machine else None,
        "bubble": found.line.bubble,
        "memory_bytes": room,
        "peak_bytes": {name: found.peak(way) for name, way in ways.items()},
        "fits": {name: None if room is None else found.peak(way) <= room for name, way in ways.items()},
        "ranks": [
            dataclasses.asdict(rank)
            | {"shared": rank.shared._asdict()}
            | {"bytes": {name: rank.nbytes(way) for name, way in ways.items()}}
            for rank in found.ranks
        ],
    }


def _text(told: dict[str, Any]) -> str:
    mesh = ",".join(f"{k}={v}" for k, v in told["mesh"].items())
    rows, tokens = told["micro_batch"]
    lines = [
        f"{told['depth']}, {told['precision']}, {mesh}: {told['processes']} processes; {told['micro_batches']} "
        f"micro-batches of {rows} x {tokens} tokens on each copy",
        _schedule(told),
        "",
        f"{'rank':>4} {'parameters':>12} {'weights':>8} {'grads':>8} {'optim.':>8} {'activ.':>8} {'state':>8} "
        f"{'recomp.':>8} {'live':>5} {'all':>8} {'sharded':>8}   GB; sent in a step to stages, slices, copies",
    ]
    for rank in told["ranks"]:
        held = " ".join(f"{_gb(rank[part])}" for part in PARTS)
        both = " ".join(_gb(rank["bytes"][way]) for way in ("whole", "sharded"))
        sent = " ".join(_gb(rank["sent"][to]) for to in ("pipeline", "tensor", "data"))
        lines.append(f"{rank['rank']:>4} {rank['parameters']:>12,} {held} {rank['live']:>5} {both} {sent}")
    host = max(rank["host"] for rank in told["ranks"])
    if told["precision"] == "bf16_master" and told["micro_batches"] == 1:
        lines.append(
            "gradients: at most, 6 bytes a number; of one micro-batch on one process 2 to 4 are there at once"
        )
    lines += [f"the host holds up to {host / 1e9:.3g} GB of each process besides"] if host else []
    return "\n".join([*lines, "", *_verdict(told)])


def _schedule(told: dict[str, Any]) -> str:
    if told["mesh"]["pp"] == 1:
        return "no pipeline"
    took = f" of {told['seconds']:.3g} s on {told['hardware']}" if told["seconds"] else ", by FLOPs"
    return (
        f"{told['schedule']}, stages per process {told['virtual']}, transport {told['transport']}: "
        f"bubble {told['bubble']:.1%} of a step{took}"
    )


def _verdict(told: dict[str, Any]) -> list[str]:
    names = {
        "whole": "every copy with all of its part",
        "sharded": "weights, gradients and optimiser sharded over dp",
    }
    room = told["memory_bytes"]
    lines = []
    for way, words in names.items():
        said = f"{words}: {told['peak_bytes'][way] / 1e9:.3g} GB at the most"
        if room is not None:
            said += f", {'fits' if told['fits'][way] else 'does not fit'} in {room / 1e9:g} GB"
        lines.append(said)
    return lines if room is not None else [*lines, "give --hardware or --memory-gb to see whether it fits"]


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:8.3g}"
