"""The numbers of a divided model: drawn or read, so that a process never holds more than its parts and one tensor.

A process of several builds its model without memory (`parallel/deferred.py`) and divides it. Then each part is given
memory and filled: drawn anew as one process would, or read from a file that any number of processes wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from twoaxis.model import Decoder
from twoaxis.model.files import WholeFile, check_names, check_tied, plain_name
from twoaxis.model.shards import INDEX, Shards
from twoaxis.parallel.deferred import Blank
from twoaxis.parallel.placement import Placement


class Filling:
    """Fills a model that was built as `Blank`. weights: a `weights_path` to read, None to draw.

    stream: whether the random numbers that one process would draw are drawn even so.
    """

    def __init__(self, blank: Blank, device: torch.device, weights: Path | None, stream: bool) -> None:
        self.blank, self.device, self.weights, self.stream = blank, device, weights, stream

    def fill(self, placements: Mapping[str, Placement]) -> None:
        """Give memory and numbers to the parts that the model still has. placements: where they lie."""
        model, blank = self.blank.model, self.blank
        give_memory(model, self.device)
        parts = {plain_name(n): _local(p) for n, p in model.named_parameters()}
        buffers = dict(model.named_buffers())

        def deliver(name: str, whole: Tensor) -> None:
            if name in buffers:
                buffers[name].copy_(whole)
            else:
                put_part(parts[name], placements[name], whole)

        drawn = set(buffers) if self.weights else parts.keys() | buffers
        blank.draw(drawn, deliver, self.stream)
        if self.weights:
            placed = {n: (t, placements[n]) for n, t in parts.items()}
            read_parts(placed, self.weights, blank)


def give_memory(model: Decoder, device: torch.device) -> None:
    """Memory on `device`, without numbers, for what lies on the meta device; a tied head stays tied."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    ends = (model.embedding, model.head)
    one, other = (
        reversed(ends) if isinstance(model.head, FSDPModule) else ends
    )  # FSDP knows the first by its place
    if model.cfg.tie_embeddings and one.weight is not None and other.weight is not None:
        other.weight = one.weight


@torch.no_grad()
def put_part(part: Tensor, place: Placement, whole: Tensor) -> None:
    """Copy the part of a whole tensor to where it belongs."""
    for offsets, view in place.pieces(part):
        box = tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))
        view.copy_(whole[box])


def read_parts(parts: Mapping[str, tuple[Tensor, Placement]], path: Path, blank: Blank) -> None:
    """Read these parts of the model's weights from a `weights_path`, in place, and nothing else of it.

    InputError if the names or shapes of the whole model are not those of the file.
    """
    from twoaxis.train.dcp_load import fill

    tied = blank.model.cfg.tie_embeddings
    saved, prefix = (Shards(path.parent), "model/") if path.name == INDEX else (WholeFile(path), "")
    found = {n.removeprefix(prefix) for n in saved.tensors if n.startswith(prefix)}
    lent = not tied and "head.weight" not in found and "embedding.weight" in found
    both = tied and "head.weight" in found
    head = {"head.weight"} if lent or both else set[str]()
    check_names(path, set(blank.tensors) - blank.buffers, (found - head) | (head if lent else set()))
    own = {prefix + n: part for n, part in parts.items() if not (lent and n == "head.weight")}
    fill(own, saved)
    if lent and "head.weight" in parts:
        fill({prefix + "embedding.weight": parts["head.weight"]}, saved)
    if both and "embedding.weight" in parts:
        table, place = parts["embedding.weight"]
        other = torch.empty_like(table)
        fill({prefix + "head.weight": (other, place)}, saved)
        check_tied(path, other, table)


def _local(parameter: Tensor) -> Tensor:
    """The memory of a parameter: of one that FSDP divides this process's share."""
    own: Tensor = getattr(parameter, "_local_tensor", parameter).detach()
    return own
