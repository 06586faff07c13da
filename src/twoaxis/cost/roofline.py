"""How long a model's step takes: each kernel at the machine's limit, with launches, sending and the bubble.

    kernel    max(FLOPs / matrix rate, bytes / bandwidth), and exponentials at a softmax's rate
    device    the sum over kernels, or the time to launch them where that is longer and launching is asynchronous;
              device and launches together where it is not
    stage     forward, backward (and forward again with checkpointing) of one micro-batch on one pipeline stage,
              and the all-reduces of tensor slices and the halos of sequence parts, which nothing hides
    step      m micro-batches over P stages, 1F1B: m max(stage, send) + (P - 1) (stage + send), the optimiser, and
              what the gradients' all-reduce takes beyond the last backward pass

Layouts split work evenly: products, activations and states by tp and cp, blocks by pp (elementwise work is split by
tp as well, "sequence parallel"). Rates are peaks for presets, so times are lower bounds and overheads are what a
good implementation could reach; a calibrated machine has measured rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from twoaxis.cost.boundaries import boundaries, largest
from twoaxis.cost.hardware import Hardware
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.passes import traced
from twoaxis.cost.works import Execution, Work, works
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.tape import Tape
from twoaxis.types import DTYPES

ADAMW_ARRAYS = 7  # weight, gradient and two moments read, three of them written, in float32


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is run: micro-batches of `batch_size` rows of `seq_len` tokens, m of them in a step.

    decoding: one token of each row, with the rows before it cached. checkpointing: blocks are recomputed.
    """

    batch_size: int = 1
    seq_len: int = 2048
    micro_batches: int = 8
    dtype: str = "bfloat16"
    decoding: bool = False
    execution: Execution = "fused"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "micro_batches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}={value!r}: allowed is an integer of 1 or more")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r}: allowed is {' or '.join(DTYPES)}")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The predicted seconds of one step and where they go.

    seconds: all. device, launch: of one micro-batch on one stage; arithmetic, memory: the device's, by what limits
    each kernel. tensor, sequence: sending that is not hidden. send: one boundary's, one way. bubble: share of the
    step in which a stage waits. exposed: gradients' all-reduce beyond the backward pass. hides_launches: behind the
    device. bound: what limits it.
    """

    seconds: float
    device: float
    launch: float
    arithmetic: float
    memory: float
    tensor: float
    sequence: float
    send: float
    bubble: float
    exposed: float
    sent_bytes: int
    launches: int
    hides_launches: bool

    @property
    def bound(self) -> str:
        """arithmetic, memory, launches or sending: the largest."""
        held = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "launches": 0.0 if self.hides_launches and self.launch <= self.device else self.launch,
            "sending": self.tensor + self.sequence + max(0.0, self.send - self.device),
        }
        return max(held, key=lambda name: held[name])


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of some kernels on one device."""

    arithmetic: float
    memory: float
    launch: float
    launches: int

    @property
    def device(self) -> float:
        """The sum over kernels of what limits each."""
        return self.arithmetic + self.memory

    def on(self, machine: Hardware) -> float:
        """Seconds with launches, hidden or not."""
        return max(self.device, self.launch) if machine.asynchronous else self.device + self.launch


def times(
    todo: list[Work], machine: Hardware, dtype: str, share: float = 1.0, stages: int = 1, cold: bool = False
) -> Times:
    """Seconds of kernels of which a device does 1 / share, launching 1 / stages of them.

    cold: what they read was made long ago, as in a backward pass.
    """
    arithmetic = memory = 0.0
    for work in todo:
        size = work.nbytes / max(1, work.launches)
        moving = work.nbytes / machine.memory_rate(size, cold) if work.nbytes else 0.0
        if machine.softmax_gb_per_s:  # bytes of a softmax: read and written in float32
            moving = max(moving, 8 * work.exponentials / (1e9 * machine.softmax_gb_per_s))
        computing = work.flops / machine.matrix_rate(dtype, work.flops) if work.product else 0.0
        if work.batched and machine.batched_tflops:
            computing = work.flops / (1e12 * machine.batched_tflops)
        if work.product and work.exponentials:  # attention does one after the other
            arithmetic += computing + moving
        elif computing > moving:
            arithmetic += computing
        else:
            memory += moving
    launches = sum(work.launches for work in todo) / stages
    launch = 1e-6 * (machine.launch_us or 0.0) * launches
    return Times(arithmetic / share, memory / share, launch, round(launches))


def tape_of(model: ModelConfig, load: Load) -> Tape:
    """The model's pass; InputError for a method that does not say what it does."""
    t = traced(model, load.batch_size, load.seq_len, load.dtype, load.decoding)
    if t is None:
        raise InputError(f"{model.depth}: its time is not known, {model.depth_config().untraced}")
    return t


def predict(
    model: ModelConfig, machine: Hardware, load: Load, mesh: Mesh | None = None, tape: Tape | None = None
) -> Step:
    """The step of a model on a machine, laid out on a mesh (one device if none is given). tape: its pass."""
    mesh, t = mesh or Mesh(), tape or tape_of(model, load)
    share = float(mesh.tp * mesh.cp * mesh.pp)
    forward, backward = works(t, load.execution)
    ahead = times(forward, machine, load.dtype, share, mesh.pp)
    back = times([] if load.decoding else backward, machine, load.dtype, share, mesh.pp, cold=True)
    passes = [ahead] if load.decoding else [ahead, back, *([ahead] if load.checkpointing else [])]
    both = Times(
        *(sum(x) for x in zip(*((p.arithmetic, p.memory, p.launch, p.launches) for p in passes), strict=True))
    )
    ways = 1 if load.decoding else 2
    tensor = ways * _tensor(model, machine, t, mesh)
    sequence = ways * _sequence(model, machine, load, mesh)
    stage = both.on(machine) + tensor + sequence
    sent = _sent(model, t, load, mesh)
    send = ways * _seconds(sent, machine, mesh.pp, mesh.tp * mesh.cp * mesh.pp)
    m = 1 if load.decoding else load.micro_batches
    if load.decoding:  # one token passes all stages, one after another
        seconds = mesh.pp * stage + (mesh.pp - 1) * send
        bubble, exposed = 0.0, 0.0
    else:
        pipeline = m * max(stage, send) + (mesh.pp - 1) * (stage + send)
        exposed = max(0.0, _gradients(model, machine, t, mesh) - back.on(machine))
        seconds = pipeline + exposed + _optimizer(t, machine, mesh)
        bubble = 1 - m * stage / pipeline
    return Step(
        seconds=seconds,
        device=both.device,
        launch=both.launch,
        arithmetic=both.arithmetic,
        memory=both.memory,
        tensor=tensor,
        sequence=sequence,
        send=send,
        bubble=bubble,
        exposed=exposed,
        sent_bytes=sent,
        launches=both.launches,
        hides_launches=machine.asynchronous,
    )


def weights(t: Tape) -> int:
    """Learned numbers that a pass reads."""
    return sum(x.numbers for x in {x.root for k in t.kernels for x in k.inputs if x.root.parameter})


def _sent(model: ModelConfig, t: Tape, load: Load, mesh: Mesh) -> int:
    """Bytes of one micro-batch across the worst boundary in use, by the cheapest transport, on one device."""
    if mesh.pp == 1:
        return 0
    if load.decoding:
        found = largest(t)
        return min(found.values()) // (mesh.tp * mesh.cp)
    cuts = [model.n_blocks // mesh.pp * s for s in range(1, mesh.pp)]
    rows = boundaries(model, load.batch_size, load.seq_len, cuts, dtype=load.dtype)
    return max(min(row.sent.values()) for row in rows) // (mesh.tp * mesh.cp)


def _tensor(model: ModelConfig, machine: Hardware, t: Tape, mesh: Mesh) -> float:
    """One all-reduce after each core that multiplies matrices, of the tokens' width."""
    sliced = {kernel.part for kernel in t.kernels if kernel.product}
    cores = sum(core.kind in sliced for block in model.block_configs() for core in block) / mesh.pp
    sent = t.tokens / mesh.cp * model.d_model * t.itemsize
    return cores * _all_reduce(sent, machine, mesh.tp, mesh.tp)


def _sequence(model: ModelConfig, machine: Hardware, load: Load, mesh: Mesh) -> float:
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
    return _seconds(sent / mesh.pp, machine, mesh.cp, mesh.tp * mesh.cp)


def _gradients(model: ModelConfig, machine: Hardware, t: Tape, mesh: Mesh) -> float:
    return _all_reduce(weights(t) * t.itemsize / (mesh.tp * mesh.pp), machine, mesh.dp, mesh.devices)


def _optimizer(t: Tape, machine: Hardware, mesh: Mesh) -> float:
    """AdamW on this device's share of the weights, in one kernel."""
    moved = ADAMW_ARRAYS * 4 * weights(t) / mesh.devices * mesh.cp
    return moved / machine.memory_rate()


def _all_reduce(nbytes: float, machine: Hardware, parts: int, devices: int) -> float:
    return _seconds(2 * (parts - 1) / parts * nbytes, machine, parts, devices)


def _seconds(nbytes: float, machine: Hardware, parts: int, devices: int) -> float:
    """Sending between parts that lie in a group of so many devices."""
    if parts == 1 or not nbytes:
        return 0.0
    rate = machine.send_rate(devices)
    if rate is None:
        raise InputError(
            f"{machine.name} has no known bandwidth among {devices} devices; ask for one device, or put link_gb_per_s "
            f"or network_gb_per_s into a machine's file"
        )
    return nbytes / rate
