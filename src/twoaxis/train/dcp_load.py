"""Reading through torch.distributed.checkpoint: a process fills its parts from what any number of others wrote.

DCP finds which boxes of which pieces they need; the files are those of `model/shards.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from twoaxis.errors import InputError
from twoaxis.model.shards import Shards, piece_key
from twoaxis.train.dcp_save import Parts, key_of, quiet


class LoadPieces(DefaultLoadPlanner):
    """Plans what fills these parts. InputError for a tensor that is not there or has another shape."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.views: dict[str, Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of saved pieces with those wanted here."""
        items: list[ReadItem] = []
        assert self.metadata is not None
        for name, (tensor, place) in self.parts.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != place.shape:
                found = "nothing" if entry is None else tuple(getattr(entry, "size", ()))
                raise InputError(
                    f"the checkpoint has {found} for {name} {place.shape}; it belongs to another configuration"
                )
            chunks = []
            for offsets, view in place.pieces(tensor):
                self.views[piece_key(name, offsets)] = view
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), view.shape))
            items += create_read_items_for_chunk_list(name, entry, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where a piece goes."""
        view = self.views[key_of(read_item.dest_index)]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view


class ShardReader(StorageReader):
    """Reads boxes of the files that `ShardWriter` wrote, or of a file of whole tensors."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, in DCP's words."""
        told: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=s.dtype),
                torch.Size(s.shape),
                [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in s.pieces],
            )
            for name, s in self.shards.tensors.items()
        }
        return Metadata(told)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Where each piece lies."""
        self.pieces = {
            piece_key(name, p.offsets): p for name, s in self.shards.tensors.items() for p in s.pieces
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Copy every box to its place."""
        for item in plan.items:
            at = item.storage_index
            piece = self.pieces[key_of(at)]
            box = self.shards.read(at.fqn, piece, tuple(item.storage_offsets), tuple(item.lengths))
            planner.resolve_tensor(item).copy_(box)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders are given to the constructor."""
        return False


def fill(parts: Parts, shards: Shards) -> None:
    """Read this process's parts, in place, from what any number of processes wrote; nothing else is read."""
    state = {name: tensor for name, (tensor, _) in parts.items()}
    quiet()
    try:
        dcp.load(state, storage_reader=ShardReader(shards), planner=LoadPieces(parts), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from None
