"""What the processes of a world hold while a run begins, and what they read of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import twoaxis
from twoaxis.model import Decoder
from twoaxis.model.shards import Shards
from twoaxis.parallel.deferred import Blank
from twoaxis.train import TrainConfig
from twoaxis.train.filling import Filling
from twoaxis.train.team import Team


class Held(TorchDispatchMode):
    """Bytes of tensors that are alive at once, at most; those on the meta device have none."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        for x in tree_leaves(out):
            x = getattr(x, "_local_tensor", x)
            if isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta:
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(n for _, n in self.alive.values()))
        return out


def filled(
    fields: dict[str, Any], options: dict[str, Any], weights: str | None = None
) -> tuple[int, int, int, bool]:
    """A team's model, filled: bytes of its parts, of the largest tensor, held at most; all as in one process."""
    cfg = TrainConfig(model=twoaxis.ModelConfig(**fields), device="cpu", **options)
    torch.manual_seed(5)
    with Held() as held:
        blank = Blank(cfg.model)
        filling = Filling(blank, torch.device("cpu"), Path(weights) if weights else None, stream=not weights)
        team = Team(cfg, blank.model, torch.device("cpu"), filling)
    after = torch.rand(4)
    torch.manual_seed(5)
    whole = twoaxis.load(Path(weights).parent) if weights else Decoder(cfg.model)
    equal = bool(weights) or torch.equal(after, torch.rand(4))
    owned = {n: getattr(p, "_local_tensor", p).detach() for n, p in blank.model.named_parameters()}
    numbers = dict(whole.named_parameters())
    equal &= all(torch.equal(team.placements[n].of(numbers[n].detach()), t) for n, t in owned.items())
    equal &= all(torch.equal(dict(whole.named_buffers())[n], t) for n, t in blank.model.named_buffers())
    largest = max(p.numel() * p.element_size() for p in numbers.values())
    return sum(t.numel() * t.element_size() for t in owned.values()), largest, held.most, equal


def read_of(cfg: dict[str, Any], out: str) -> tuple[int, int]:
    """Go on with a run: bytes that this process reads, and bytes of its parts of the model and the optimiser."""
    made: list[Any] = []
    count = [0]
    read, begin = Shards.read, Team.__init__

    def counted(self: Shards, *args: Any) -> Tensor:
        box = read(self, *args)
        count[0] += box.numel() * box.element_size() if "random" not in args[0] else 0
        return box

    def kept(self: Team, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    def whole(*_: Any) -> None:
        raise AssertionError("whole tensors are read")

    under, Shards.read, Shards.under, Team.__init__ = Shards.under, counted, whole, kept
    try:
        twoaxis.train(TrainConfig.from_dict(cfg), out, resume=True)
    finally:
        Shards.read, Shards.under, Team.__init__ = read, under, begin
    (team,) = made
    held = {n for n, _ in team.model.named_parameters()}
    shapes = [at.local_shape for n, at in team.placements.items() if n in held]
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    return count[0], 4 * (3 * numbers + len(shapes))  # weights, two moments, a step
