"""Saving through torch.distributed.checkpoint: each process writes its pieces, any number of them can read.

DCP plans who writes what (of equal pieces one) and brings errors together; the
files are those of `model/shards.py`, so nothing is pickled on the disk. The first process writes the index, the
plain data, and last the marker; then the folder takes its name (`checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from twoaxis.model.shards import INDEX, Piece, Stored, piece_key, to_index
from twoaxis.parallel.placement import Placement
from twoaxis.train.checkpoint import write_synced

Parts = Mapping[str, tuple[Tensor, Placement]]


def quiet() -> None:
    """One process is meant where there is one: DCP need not warn of it, in this thread or another."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class SavePieces(DefaultSavePlanner):
    """Plans the pieces of these parts. The state to save is `pieces_of` them."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts

    def create_local_plan(self) -> SavePlan:
        """One item for each piece."""
        items = []
        for name, (tensor, place) in self.parts.items():
            for offsets, view in place.pieces(tensor):
                chunk = ChunkStorageMetadata(torch.Size(offsets), view.shape)
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(place.shape))
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The numbers of a piece, staged or not."""
        tensor: Tensor = self.state_dict[key_of(write_item.index)]
        return tensor


def pieces_of(parts: Parts) -> dict[str, Tensor]:
    """The pieces of parts by `piece_key`."""
    return {
        piece_key(name, offsets): view
        for name, (tensor, place) in parts.items()
        for offsets, view in place.pieces(tensor.detach())
    }


def key_of(index: MetadataIndex) -> str:
    """What a piece that DCP names is called."""
    return piece_key(index.fqn, tuple(index.offset or ()))


class ShardWriter(StorageWriter):
    """Writes one file per process into `folder`. complete: called last, on the first, with every file's mark."""

    def __init__(
        self, folder: Path, plain: dict[str, bytes], complete: Callable[[dict[str, Any]], None]
    ) -> None:
        self.folder, self.plain, self.complete = folder, plain, complete

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder before anyone writes."""
        if is_coordinator:
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """A file for each process."""
        return [replace(p, storage_data=f"shard-{i:05d}.safetensors") for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write and sync this process's file."""
        tensors = {key_of(i.index): planner.resolve_data(i).cpu().contiguous() for i in plan.items}
        data = to_bytes(tensors, {"format": "pt"})
        write_synced(self.folder / plan.storage_data, data)
        mark = (plan.storage_data, len(data), hashlib.sha256(data).hexdigest())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(i.index, len(data), mark) for i in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the plain files, then complete the folder."""
        marks: dict[str, Any] = {}
        files: dict[str, str] = {}
        for result in (r for several in results for r in several):
            file, size, digest = result.storage_data
            marks[file], files[key_of(result.index)] = [size, digest], file
        tensors = {
            name: Stored(
                entry.properties.dtype,
                tuple(entry.size),
                tuple(
                    Piece(files[piece_key(name, tuple(c.offsets))], tuple(c.offsets), tuple(c.sizes))
                    for c in entry.chunks
                ),
            )
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        for name, data in (self.plain | {INDEX: to_index(tensors).encode()}).items():
            write_synced(self.folder / name, data)
            marks[name] = [len(data), hashlib.sha256(data).hexdigest()]
        self.complete(marks)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Folders are given to the constructor."""
        return False
