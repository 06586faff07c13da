"""The memory that one device of a layout needs, and whether blocks must be recomputed to fit.

training   weights and gradients in the model's dtype, AdamW's float32 state (4 more bytes a weight where the
           weights are not float32), split by tp and pp, and the state by dp as well;
           saved activations of the micro-batches in flight (P of them at most), split by tp and cp; of a network
           that runs again for its backward pass what one micro-batch saves then
decoding   weights and the cache, split by tp and pp
"""

from __future__ import annotations

from dataclasses import dataclass

from twoaxis.cost.counts import checkpointed, kept, recomputed_bytes
from twoaxis.cost.load import Load
from twoaxis.cost.mesh import Mesh
from twoaxis.tape import Array, Tape


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device: of weights, gradients and optimiser; of activations or the cache; of both if blocks
    are recomputed."""

    model: float
    activations: float
    checkpointed: float

    def fits(self, nbytes: float | None, checkpointing: bool) -> bool:
        """Whether a device of so many bytes holds it; an unknown size holds all."""
        held = self.checkpointed if checkpointing else self.activations
        return nbytes is None or self.model + held <= nbytes


def memory(t: Tape, load: Load, mesh: Mesh, parameters: int, state_bytes: int) -> Memory:
    """What a pass needs on each device. parameters, state_bytes: of the whole model and its decoding cache."""
    slices = mesh.tp * mesh.pp
    if load.decoding:
        held = state_bytes / (slices * mesh.cp)
        return Memory(model=parameters * t.itemsize / slices, activations=held, checkpointed=held)
    optimizer = (8 if t.itemsize >= 4 else 12) / mesh.dp
    spread = mesh.tp * mesh.cp
    flight = min(load.micro_batches, mesh.pp) / mesh.pp
    saved, inputs = kept(t), checkpointed(t)
    remade = sum(x.nbytes for x in t.saved() if x not in saved)
    ends, ends_kept = _of_head(saved), _of_head(inputs)  # these lie on the last stage alone
    return Memory(
        model=parameters / slices * (2 * t.itemsize + optimizer),
        activations=((_bytes(saved) - ends) * flight + ends + remade) / spread,
        checkpointed=((_bytes(inputs) - ends_kept) * flight + ends_kept + recomputed_bytes(t)) / spread,
    )


def _bytes(arrays: dict[Array, str]) -> int:
    return sum(x.nbytes for x in arrays)


def _of_head(arrays: dict[Array, str]) -> int:
    return sum(x.nbytes for x, part in arrays.items() if part == "head")
