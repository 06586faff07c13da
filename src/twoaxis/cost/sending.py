"""What the devices of a layout send each other in a step, and how long it takes.

Slices of tensors all-reduce after a core, parts of a sequence send keys and values, stages of a pipeline send
states, copies of the model all-reduce their gradients.
"""

from __future__ import annotations

from twoaxis.cost.boundaries import boundaries, largest
from twoaxis.cost.hardware import Hardware
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.tape import Tape
from twoaxis.types import DTYPES


def weights(t: Tape) -> int:
    """Learned numbers that a pass reads."""
    return sum(x.numbers for x in {x.root for k in t.kernels for x in k.inputs if x.root.parameter})


def sent_bytes(model: ModelConfig, t: Tape, load: Load, mesh: Mesh) -> int:
    """Bytes of one micro-batch across the worst boundary in use, by the cheapest transport, on one device."""
    if mesh.pp == 1:
        return 0
    if load.decoding:
        found = largest(t, model.depth_config().pushes)
        return min(found.values()) // (mesh.tp * mesh.cp)
    cuts = [model.n_blocks // mesh.pp * s for s in range(1, mesh.pp)]
    rows = boundaries(model, load.batch_size, load.seq_len, cuts, dtype=load.dtype)
    return max(min(row.sent.values()) for row in rows) // (mesh.tp * mesh.cp)


def tensor_seconds(model: ModelConfig, machine: Hardware, t: Tape, mesh: Mesh) -> float:
    """One all-reduce after each core that multiplies matrices, of the tokens' width."""
    sliced = {kernel.part for kernel in t.kernels if kernel.product}
    cores = sum(core.kind in sliced for block in model.block_configs() for core in block) / mesh.pp
    sent = t.tokens / mesh.cp * model.d_model * t.itemsize
    return cores * _all_reduce(sent, machine, mesh.tp, mesh.tp)


def sequence_seconds(model: ModelConfig, machine: Hardware, load: Load, mesh: Mesh) -> float:
    """Keys and values, or a halo of them, of the sequence's other parts."""
    if mesh.cp == 1 or load.decoding:
        return 0.0
    layout, part = model.layout(), load.seq_len // mesh.cp
    row = 2 * layout.n_kv_heads * (layout.d_model // layout.n_heads) * DTYPES[load.dtype].itemsize / mesh.tp
    sent = 0.0
    for block, cores in enumerate(model.block_configs()):
        for core in cores:
            halo = core.halo_in(block)
            rows = load.seq_len - part if halo is None else min(halo, load.seq_len - part)
            sent += load.batch_size * rows * row
    return seconds_between(sent / mesh.pp, machine, mesh.cp, mesh.tp * mesh.cp)


def gradient_seconds(model: ModelConfig, machine: Hardware, t: Tape, mesh: Mesh) -> float:
    """The all-reduce of a device's gradients over the data-parallel copies."""
    return _all_reduce(weights(t) * t.itemsize / (mesh.tp * mesh.pp), machine, mesh.dp, mesh.devices)


def _all_reduce(nbytes: float, machine: Hardware, parts: int, devices: int) -> float:
    return seconds_between(2 * (parts - 1) / parts * nbytes, machine, parts, devices)


def seconds_between(nbytes: float, machine: Hardware, parts: int, devices: int) -> float:
    """Seconds to send bytes between parts of a group of so many devices; InputError where no rate is known."""
    if parts == 1 or not nbytes:
        return 0.0
    rate = machine.send_rate(devices)
    if rate is None:
        raise InputError(
            f"{machine.name} has no known bandwidth among {devices} devices; ask for one device, or put link_gb_per_s "
            f"or network_gb_per_s into a machine's file"
        )
    return nbytes / rate
