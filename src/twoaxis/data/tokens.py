"""Token files: the ids of one split, memory-mapped, behind a header that says what they are.

Layout, little-endian: magic (8 bytes), version (u4), length of the JSON header (u4), the header padded with
blanks to a multiple of 8, document offsets (i8, one more than documents), ids (u1, u2 or u4).
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoaxis.data.checks import whole
from twoaxis.data.files import write_atomically
from twoaxis.data.tokenizer import Tokenizer
from twoaxis.errors import InputError, RunError

MAGIC, VERSION = b"twoaxTOK", 1
PREFIX = struct.Struct("<8sII")  # magic, version, length of the JSON header
FACTS = ("tokenizer", "fingerprint", "vocab_size", "n_bytes", "largest_id", "digest")  # header and attribute


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Ids of a split with their documents; in memory (`path` is None) or mapped from `path`."""

    ids: NDArray[Any]  # (n_tokens,) uint8, uint16 or uint32, by vocabulary
    documents: NDArray[np.int64]  # (n_documents + 1,) where each document starts, then n_tokens
    tokenizer: str  # name, such as "byte"
    fingerprint: str  # SHA-256 of the tokeniser's definition
    vocab_size: int
    n_bytes: int  # UTF-8 bytes of the text
    largest_id: int  # -1 without tokens
    digest: str  # SHA-256 of fingerprint, documents and ids: which data this is
    path: Path | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, the mean over the file."""
        return self.n_bytes / self.n_tokens

    def bits_per_byte(self, total_nats: float, n_targets: int) -> float:
        """Bits per byte of text from a loss summed over `n_targets` of this file's tokens.

        The mean bits per target over the mean bytes per token, so that the tokens that cannot be targets
        (the first) or were not scored count at the mean rate. Comparable over tokenisers.
        """
        whole("n_targets", n_targets, least=1)
        return total_nats / n_targets / math.log(2) / self.bytes_per_token

    @classmethod
    def pack(
        cls,
        documents: Iterable[ArrayLike],
        *,
        vocab_size: int,
        n_bytes: int,
        tokenizer: str,
        fingerprint: str,
    ) -> "TokenFile":
        """Join documents of ids (T,), empty ones left out; an id outside the vocabulary raises InputError."""
        dtype = id_dtype(vocab_size)
        parts = [_narrow(ids, number, vocab_size, dtype) for number, ids in enumerate(documents)]
        parts = [part for part in parts if part.size]
        ids = np.concatenate([np.empty(0, dtype), *parts])
        offsets = np.cumsum([0, *map(len, parts)], dtype="<i8")
        digest = hashlib.sha256(fingerprint.encode("utf-8"))
        for array in (offsets, ids):
            digest.update(array.view(np.uint8).data)
        largest = int(ids.max()) if ids.size else -1
        return cls(ids, offsets, tokenizer, fingerprint, vocab_size, n_bytes, largest, digest.hexdigest())

    def write(self, path: str | Path) -> "TokenFile":
        """Write the file atomically and return it memory-mapped."""
        header: dict[str, Any] = {fact: getattr(self, fact) for fact in FACTS}
        header |= {
            "dtype": self.ids.dtype.name,
            "n_tokens": self.n_tokens,
            "n_documents": len(self.documents) - 1,
        }
        text = json.dumps(header).encode("utf-8")
        text += b" " * (-(PREFIX.size + len(text)) % 8)
        arrays = [self.documents.view(np.uint8).data, self.ids.view(np.uint8).data]
        write_atomically(Path(path), [PREFIX.pack(MAGIC, VERSION, len(text)), text, *arrays])
        return TokenFile.read(path)

    @classmethod
    def read(cls, path: str | Path) -> "TokenFile":
        """Map a token file; RunError if it is cut or damaged, InputError if missing or something else."""
        path = Path(path)
        header, start = _read_header(path)
        size = path.stat().st_size
        try:
            dtype = id_dtype(header["vocab_size"])
            if header["dtype"] != dtype.name:
                raise ValueError
            middle = start + 8 * (header["n_documents"] + 1)
            expected = middle + dtype.itemsize * header["n_tokens"]
            facts = {fact: header[fact] for fact in FACTS}
        except (KeyError, TypeError, ValueError):
            raise _damaged(path, size, "a readable header") from None
        if size != expected:
            raise _damaged(path, size, f"{expected} bytes")
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        return cls(ids=raw[middle:].view(dtype), documents=raw[start:middle].view("<i8"), path=path, **facts)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Encode documents into a token file in memory."""
    documents = list(texts)
    return TokenFile.pack(
        (tokenizer.encode(text) for text in documents),
        vocab_size=tokenizer.vocab_size,
        n_bytes=sum(len(text.encode("utf-8")) for text in documents),
        tokenizer=tokenizer.name,
        fingerprint=tokenizer.fingerprint,
    )


def check_vocab(tokens: TokenFile, vocab_size: int, fingerprint: str | None = None) -> None:
    """InputError unless a model of `vocab_size` (and of this tokeniser, if given) can read `tokens`."""
    if tokens.vocab_size > vocab_size:
        raise InputError(
            f"the data do not fit the model: ids up to {tokens.largest_id} of a vocabulary of "
            f"{tokens.vocab_size} ({tokens.tokenizer}), but the model's vocabulary is {vocab_size}; "
            f"set vocab_size={tokens.vocab_size}"
        )
    if fingerprint is not None and tokens.fingerprint != fingerprint:
        raise InputError(
            f"the data are of tokenizer {tokens.tokenizer} ({tokens.fingerprint[:12]}), the model's is "
            f"{fingerprint[:12]}; prepare the data with the model's tokenizer"
        )


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and uint32 (little-endian) that holds ids 0 .. vocab_size-1."""
    whole("vocab_size", vocab_size, least=1)
    for dtype in ("<u1", "<u2", "<u4"):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise InputError(f"vocab_size {vocab_size} is too large: token ids have at most 32 bits")


def _narrow(ids: ArrayLike, number: int, vocab_size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"document {number} must be one list of whole-number ids, not {array.ndim} axes of {array.dtype}"
        )
    for id_ in (array.min(), array.max()) if array.size else ():
        if not 0 <= id_ < vocab_size:
            raise InputError(
                f"document {number} has id {id_}, outside the vocabulary of {vocab_size}; check the tokenizer"
            )
    return array.astype(dtype)


def _read_header(path: Path) -> tuple[Mapping[str, Any], int]:
    """The JSON header and the byte at which the arrays start."""
    try:
        with path.open("rb") as file:
            prefix = file.read(PREFIX.size)
            if not MAGIC.startswith(prefix[: len(MAGIC)]):
                raise InputError(f"{path} is not a token file of twoaxis; give one that `prepare` wrote")
            if len(prefix) < PREFIX.size:
                raise _damaged(path, len(prefix), f"at least {PREFIX.size} bytes")
            _, version, length = PREFIX.unpack(prefix)
            if version != VERSION:
                raise InputError(
                    f"{path} has token file version {version}, this twoaxis reads {VERSION}; prepare it again"
                )
            text = file.read(length)
    except OSError as error:
        raise InputError(f"cannot read token file {path}: {error.strerror}") from None
    if len(text) < length:
        raise _damaged(path, PREFIX.size + len(text), f"at least {PREFIX.size + length} bytes")
    try:
        return json.loads(text), PREFIX.size + length
    except ValueError:
        raise _damaged(path, path.stat().st_size, "a readable header") from None


def _damaged(path: Path, found: int, expected: str) -> RunError:
    return RunError(
        f"token file {path} is damaged: expected {expected}, found {found} bytes; delete it and prepare again"
    )
