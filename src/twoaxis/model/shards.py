"""Tensors in several files: index.json says where the pieces of each lie.

    index.json               {"version": 1, "tensors": {NAME: {"dtype": .., "shape": .., "pieces": PIECES}}}, each piece
                             [FILE, OFFSETS, SIZES]
    shard-00000.safetensors  pieces under "NAME@OFFSETS"

Pieces of a tensor do not overlap and make all of it. Plain JSON and safetensors: reading runs nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twoaxis.errors import InputError

INDEX, VERSION = "index.json", 1
DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
DTYPES |= {str(d).removeprefix("torch."): d for d in (torch.int64, torch.int32, torch.uint8, torch.bool)}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: in which file, and where in the whole."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def piece_key(name: str, offsets: tuple[int, ...]) -> str:
    """What a piece is called in its file."""
    return f"{name}@{','.join(map(str, offsets))}"


def to_index(tensors: dict[str, Stored]) -> str:
    """The text of index.json."""
    told = {
        name: {
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": list(t.shape),
            "pieces": [[p.file, list(p.offsets), list(p.sizes)] for p in t.pieces],
        }
        for name, t in tensors.items()
    }
    return json.dumps({"version": VERSION, "tensors": told})


class Shards:
    """A folder of such files. InputError if the index or a file is damaged, or does not make whole tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / INDEX
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}, not {VERSION}")
            self.tensors = {name: _stored(name, told) for name, told in data["tensors"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path} cannot be read ({error}); use another checkpoint") from None

    def key(self, name: str, piece: Piece) -> str:
        """What a piece is called in its file."""
        return piece_key(name, piece.offsets)

    def read(self, name: str, piece: Piece, start: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """The box of `sizes` at `start` in a piece."""
        path, key = self.folder / piece.file, self.key(name, piece)
        try:
            with safe_open(path, framework="pt") as file:
                if not sizes:
                    tensor: Tensor = file.get_tensor(key)
                else:
                    part = file.get_slice(key)
                    tensor = part[tuple(slice(s, s + n) for s, n in zip(start, sizes, strict=True))]
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged ({error}); use another checkpoint") from None
        if tuple(tensor.shape) != sizes or tensor.dtype != self.tensors[name].dtype:
            raise InputError(f"{path} is damaged: {key} is not what the index says; use another checkpoint")
        return tensor

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The whole tensors whose names begin with `prefix`, by the rest of their names."""
        found = {}
        for name, stored in self.tensors.items():
            if name.startswith(prefix):
                whole = torch.empty(stored.shape, dtype=stored.dtype)
                for piece in stored.pieces:
                    box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
                    whole[box] = self.read(name, piece, (0,) * len(piece.sizes), piece.sizes)
                found[name.removeprefix(prefix)] = whole
        return found


def _stored(name: str, told: Any) -> Stored:
    """A tensor of the index, checked: ValueError for what cannot be."""
    shape, dtype = _sizes(told["shape"]), DTYPES[told["dtype"]]
    pieces = tuple(
        Piece(str(file), _sizes(offsets), _sizes(sizes)) for file, offsets, sizes in told["pieces"]
    )
    for piece in pieces:
        if Path(piece.file).name != piece.file or not piece.file.endswith(".safetensors"):
            raise ValueError(f"{name}: {piece.file!r} is no file of this folder")
        ends = zip(piece.offsets, piece.sizes, shape, strict=True)
        if any(offset + size > n for offset, size, n in ends):
            raise ValueError(f"{name}: a piece lies outside of {shape}")
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(shape):
        raise ValueError(f"{name}: its pieces do not make {shape}")
    return Stored(dtype, shape, pieces)


def _sizes(told: Any) -> tuple[int, ...]:
    if not isinstance(told, list) or not all(type(n) is int and n >= 0 for n in told):
        raise ValueError(f"{told!r} is not a list of sizes")
    return tuple(told)
