"""A model as a folder: config.json and model.safetensors. Tied weights are stored once."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.shards import INDEX, Piece, Shards, Stored

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; an OSError says which."""
    try:
        _write(path, data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def plain_name(name: str) -> str:
    """A parameter's name without what compiling a module adds to it."""
    return name.replace("_orig_mod.", "")


def decoder_in(model: nn.Module) -> Decoder:
    """The Decoder inside torch's wrappers (compiled, DataParallel, DDP)."""
    inner: Any = model
    while isinstance(inner, nn.Module) and not isinstance(inner, Decoder):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if inner is None or not isinstance(inner, Decoder):
        raise InputError(f"what is saved is a Decoder, not {type(model).__name__}")
    return inner


def weights_of(model: Decoder) -> dict[str, Tensor]:
    """The model's weights by plain name; a tied head is left out."""
    skip = "head.weight" if model.cfg.tie_embeddings else ""
    state = {plain_name(k): v.detach().contiguous() for k, v in model.state_dict().items()}
    return {k: v for k, v in state.items() if k != skip}


def save(model: nn.Module, folder: str | Path) -> None:
    """Write config.json and model.safetensors into a folder, each atomically.

    model: a Decoder, also one that is compiled or wrapped for data-parallel training.
    """
    model, folder = decoder_in(model), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{folder} is not a folder, and nothing can be saved in it; give another") from None
    write_atomically(folder / "model.safetensors", to_bytes(weights_of(model), metadata={"format": "pt"}))
    write_atomically(folder / "config.json", model.cfg.to_json().encode())


def load(folder: str | Path) -> Decoder:
    """The model that `save` wrote. Damaged or mismatched files raise InputError in one line."""
    folder = Path(folder)
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} holds no config.json; give a folder that twoaxis.save wrote") from None
    except OSError as error:
        raise InputError(f"{folder / 'config.json'} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{folder / 'config.json'} is not JSON ({error}); restore it or save the model again"
        ) from None
    model = Decoder(ModelConfig.from_dict(data))
    load_weights(model, weights_path(folder))
    return model


def weights_path(folder: Path) -> Path:
    """The file that says where a folder's weights are: model.safetensors, or the index of shards."""
    whole, index = folder / "model.safetensors", folder / INDEX
    return index if index.exists() and not whole.exists() else whole


def load_weights(model: Decoder, path: Path) -> None:
    """Fill a model from a `weights_path`; every name and shape must agree, dtypes follow the file."""
    weights = Shards(path.parent).under("model/") if path.name == INDEX else read_safetensors(path)
    if model.cfg.tie_embeddings:
        head = weights.pop("head.weight", None)
        table = weights.get("embedding.weight")
        if head is not None and table is not None:
            check_tied(path, head, table)
    elif "head.weight" not in weights and "embedding.weight" in weights:
        weights["head.weight"] = weights["embedding.weight"].clone()
    expected = weights_of(model)
    check_names(path, set(expected), set(weights))
    wrong = [k for k in expected if expected[k].shape != weights[k].shape]
    if wrong:
        k = wrong[0]
        raise InputError(
            f"{path}: {k} has shape {tuple(weights[k].shape)}, the configuration needs {tuple(expected[k].shape)}"
        )
    whole = [k for k in expected if not weights[k].dtype.is_floating_point]
    if whole:
        raise InputError(
            f"{path}: {whole[0]} is {weights[whole[0]].dtype}; weights are floating-point numbers"
        )
    dtypes = {w.dtype for w in weights.values()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[plain_name(name)])


def check_tied(path: Path, head: Tensor, table: Tensor) -> None:
    """InputError if a file has both and they differ."""
    if not torch.equal(head, table):
        raise InputError(f"{path}: head and embedding differ but tie_embeddings is true; set it to false")


def check_names(path: Path, expected: set[str], found: set[str]) -> None:
    """InputError naming tensors that a model needs and a file lacks, or the other way round."""
    for problem, names in (("lacks", expected - found), ("has unknown", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise InputError(
                f"{path} {problem} {len(names)} tensors ({some}); it belongs to another configuration"
            )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file; a cut or damaged file raises InputError with the expected and found size."""
    check_size(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}); use another checkpoint or write it again") from None


class WholeFile(Shards):
    """A file of whole tensors, of which parts can be read; damaged ones as in `read_safetensors`."""

    def __init__(self, path: Path) -> None:
        check_size(path)
        self.folder, self.tensors = path.parent, {}
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 it is no mapping
                    part = file.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), _DTYPES[part.get_dtype()]
                    piece = Piece(path.name, (0,) * len(shape), shape)
                    self.tensors[name] = Stored(dtype, shape, (piece,))
        except (SafetensorError, OSError, KeyError) as error:
            raise InputError(
                f"{path} is damaged ({error}); use another checkpoint or write it again"
            ) from None

    def key(self, name: str, piece: Piece) -> str:
        """The tensor's name."""
        return name


def check_size(path: Path) -> None:
    """InputError with the expected and found size if a safetensors file is not there or not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            header = file.read(min(length, size))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give a folder that holds it") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    expected = _expected_size(header, length)
    if size < 8 or len(header) < length or (expected is not None and expected != size):
        wanted = f"{expected} bytes" if expected else f"at least {8 + max(length, 2)} bytes"
        raise InputError(
            f"{path} is damaged: expected {wanted}, found {size}; use another checkpoint or write it again"
        )


def _expected_size(header: bytes, length: int) -> int | None:
    if not length or len(header) < length:
        return None
    try:
        entries = json.loads(header)
        return (
            8
            + length
            + max((e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"), default=0)
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
