"""How long a model's step takes: each kernel at the machine's limit, with launches, sending and the bubble.

    kernel    max(FLOPs / matrix rate, bytes / bandwidth), and exponentials at a softmax's rate
    device    the sum over kernels, or the time to launch them where that is longer and launching is asynchronous;
              device and launches together where it is not
    stage     forward, backward (and forward again with checkpointing) of one micro-batch on one pipeline stage,
              and the all-reduces of tensor slices and the halos of sequence parts, which nothing hides
    step      m micro-batches over P equal stages, 1F1B: m + P - 1 times a stage, as `simulate.py` finds too;
              sending is hidden behind the stages, but for P - 1 boundaries at the start and what is longer than
              a stage; the optimiser, and what the gradients' all-reduce takes beyond the last backward pass

Layouts split work evenly: products, activations and states by tp and cp, blocks by pp (elementwise work is split by
tp as well, "sequence parallel"); in decoding cp splits the rows that attention reads and nothing else. Rates are peaks
for presets, so times are lower bounds and overheads are what a good implementation could reach; a calibrated machine
has measured rates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twoaxis.cost.hardware import Hardware
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.cost.passes import traced
from twoaxis.cost.sending import (
    gradient_seconds,
    seconds_between,
    sent_bytes,
    sequence_seconds,
    tensor_seconds,
    weights,
)
from twoaxis.cost.works import Work, works
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.tape import Backend, Tape

ADAMW_ARRAYS = 7  # weight, gradient and two moments read, three of them written, in float32


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
        if work.native and machine.native_tflops:
            computing = work.flops / (1e12 * machine.native_tflops)
        if work.product and work.exponentials:  # attention does one after the other
            arithmetic += computing + moving
        elif computing > moving:
            arithmetic += computing
        else:
            memory += moving
    launches = sum(work.launches for work in todo) / stages
    launch = 1e-6 * (machine.launch_us or 0.0) * launches
    return Times(arithmetic / share, memory / share, launch, round(launches))


def _together(passes: Iterable[Times]) -> Times:
    """One after the other."""
    fields = ((p.arithmetic, p.memory, p.launch, p.launches) for p in passes)
    return Times(*(sum(x) for x in zip(*fields, strict=True)))


def tape_of(model: ModelConfig, load: Load) -> Tape:
    """The model's pass; InputError for a method that does not say what it does."""
    backend: Backend = "native" if load.execution == "native" else "plain"
    t = traced(model, load.batch_size, load.seq_len, load.dtype, load.decoding, backend)
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
    if (
        load.decoding and mesh.cp > 1
    ):  # each part of the context holds its own rows of the caches, but all weights
        shared = [work for work in forward if work.attends]
        whole = [work for work in forward if not work.attends]
        ahead = _together(
            times(todo, machine, load.dtype, by, mesh.pp)
            for todo, by in ((shared, share), (whole, share / mesh.cp))
        )
    back = times([] if load.decoding else backward, machine, load.dtype, share, mesh.pp, cold=True)
    passes = [ahead] if load.decoding else [ahead, back, *([ahead] if load.checkpointing else [])]
    both = _together(passes)
    ways = 1 if load.decoding else 2
    tensor = ways * tensor_seconds(model, machine, t, mesh)
    sequence = ways * sequence_seconds(model, machine, load, mesh)
    stage = both.on(machine) + tensor + sequence
    sent = sent_bytes(model, t, load, mesh)
    send = ways * seconds_between(sent, machine, mesh.pp, mesh.tp * mesh.cp * mesh.pp)
    m = 1 if load.decoding else load.micro_batches
    if load.decoding:  # one token passes all stages, one after another
        seconds = mesh.pp * stage + (mesh.pp - 1) * send
        bubble, exposed = 0.0, 0.0
    else:
        pipeline = (m + mesh.pp - 1) * stage + (mesh.pp - 1) * send + m * max(0.0, send - stage)
        exposed = max(0.0, gradient_seconds(model, machine, t, mesh) - back.on(machine))
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


def _optimizer(t: Tape, machine: Hardware, mesh: Mesh) -> float:
    """AdamW on this device's share of the weights, in one kernel."""
    moved = ADAMW_ARRAYS * 4 * weights(t) / mesh.devices * mesh.cp
    return moved / machine.memory_rate()
