"""Everything that a run's next step depends on: its tensors by name, and its plain data.

    model/NAME               the weights that are trained, in float32
    optimizer/NAME/FACT      what the optimiser keeps for each of them
    random/torch, ..         generators; those of the r-th process with rows of its own are random/rows.r/torch

With several processes each has a part: a tensor, where it lies in the whole one, and whether this process
answers for it (others may hold the same).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.model.files import WholeFile
from twoaxis.model.shards import Shards
from twoaxis.parallel.placement import Placement
from twoaxis.train.progress import Progress
from twoaxis.train.randomness import random_state, reseed, set_random_state

if TYPE_CHECKING:
    from twoaxis.train.session import Session


class Part(NamedTuple):
    """A process's part of a tensor."""

    tensor: Tensor
    place: Placement
    mine: bool


def parts_of(session: Session) -> dict[str, Part]:
    """Every tensor of the state that this process has."""
    found: dict[str, Part] = {}
    team = session.team
    for name, master in session.master.named.items():
        found[f"model/{name}"] = Part(master.detach(), team.placements[name], team.answers(name))
    for key, tensor in session.optimizer.state().items():
        name = key.rpartition("/")[0]
        place = team.placements[name] if tensor.ndim else Placement.whole(())
        found[f"optimizer/{key}"] = Part(tensor, place, team.answers(name))
    for key, tensor in random_state()[1].items():
        whole = Placement.whole(tuple(tensor.shape))
        found[f"random/{_own(session)}{key}"] = Part(tensor, whole, team.answers_for_rows)
    return found


def facts_of(session: Session) -> dict[str, Any]:
    """The plain data of the state, the same on every process but for generators that nothing draws from."""
    return {
        "progress": asdict(session.progress),
        "loader": session.loader.state_dict(),
        "random": random_state()[0],
    }


def take_up(session: Session, checkpoint: Path) -> None:
    """Go on from a checkpoint: everything but the weights."""
    facts = read_facts(checkpoint / "state.json")
    whole = checkpoint / "state.safetensors"
    tensors = _read_parts(session, WholeFile(whole) if whole.exists() else Shards(checkpoint))
    session.optimizer.load_state(dict(_under("optimizer/", tensors)))
    session.loader.load_state_dict(facts["loader"])
    session.progress = Progress(**facts["progress"])
    own = dict(_under(f"random/{_own(session)}", tensors))
    if "torch" in own:
        set_random_state(facts["random"], own)
    else:  # saved by fewer processes
        reseed(session.cfg.seed, session.progress.step, session.team.rows[0])


def _read_parts(session: Session, saved: Shards) -> dict[str, Tensor]:
    """This process's parts of a saved state; only they are read."""
    from twoaxis.train.dcp_load import fill

    parts: dict[str, tuple[Tensor, Placement]] = {}
    own = _own(session)
    for name, stored in saved.tensors.items():
        kind, _, rest = name.partition("/")
        place = session.team.placements.get(rest.rpartition("/")[0]) if kind == "optimizer" else None
        random = kind == "random" and rest.startswith(own) and rest.count("/") == own.count("/")
        if place is None and (random or (session.team.alone and kind == "optimizer")):
            place = Placement.whole(stored.shape)
        if place is not None:
            place = place if stored.shape else Placement.whole(())
            parts[name] = torch.empty(place.local_shape, dtype=stored.dtype), place
    fill(parts, saved)
    return {name: tensor for name, (tensor, _) in parts.items()}


def read_facts(path: Path) -> dict[str, Any]:
    """What `facts_of` gave; InputError if the file is damaged or of another version."""
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = set(state) == {"progress", "loader", "random"}
        known = known and set(state["progress"]) == set(asdict(Progress()))
        known = known and all(isinstance(v, int | float) for v in state["progress"].values())
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged ({error}); delete its folder to use an older one") from None
    if not known:
        raise InputError(f"{path} has other fields than this version of twoaxis writes")
    return state


def _own(session: Session) -> str:
    rank = session.team.rows[0]
    return f"rows.{rank}/" if rank else ""


def _under(prefix: str, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name.removeprefix(prefix), t) for name, t in tensors.items() if name.startswith(prefix))
