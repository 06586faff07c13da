"""Texts to train and validate on: the shipped corpora, or any UTF-8 file or folder."""

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from twoaxis.data.checks import nearest
from twoaxis.errors import InputError

CORPORA = ("pydocs", "shakespeare")  # shipped in data/corpora, with their licences and a README
LARGEST = 16 * 10**9  # bytes of a user's text: more is likely the wrong folder, and would fill the memory
SPLITS = ("train", "valid")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Corpus:
    """Named text in two splits, each a tuple of documents (possibly empty)."""

    name: str
    train: tuple[str, ...]
    valid: tuple[str, ...]


def load_corpus(name_or_path: str | Path, valid_fraction: float = 0.05) -> Corpus:
    """Load a shipped corpus (`"shakespeare"`, `"pydocs"`), a text file, or a folder of text files.

    A file is one document. A folder is read recursively, in the byte order of the relative paths; every file
    is a document; hidden files and folders (leading dot) and empty files are left out. Shipped corpora have
    their own validation split. A path has none: the last `valid_fraction` of its bytes is held out, cut at a
    character boundary (0 holds out nothing, 1 everything). `NAME/train` or `NAME/valid` gives that split
    alone, for names and for paths. A shipped name wins over a path; write `./shakespeare` for a folder.

    Text is UTF-8 whatever the locale. A byte-order mark at the start of a file is dropped and CRLF becomes
    LF; nothing else is changed. NUL and invalid bytes raise InputError with the file and the byte offset; an
    unknown name, an unreadable file, and a path that holds no text raise it too.
    """
    if isinstance(valid_fraction, bool) or not 0 <= valid_fraction <= 1:
        raise InputError(f"valid_fraction must be between 0 and 1, not {valid_fraction!r}")
    name, split = _resolve(str(name_or_path))
    train: tuple[str, ...]
    valid: tuple[str, ...]
    if name in CORPORA:
        train, valid = ((decode_text(_shipped(name, part), f"{name}-{part}.txt"),) for part in SPLITS)
    else:
        train, valid = _hold_out(_read_path(Path(name)), valid_fraction)
    return Corpus(
        name=str(name_or_path),
        train=() if split == "valid" else train,
        valid=() if split == "train" else valid,
    )


def decode_text(raw: bytes, source: str) -> str:
    """Decode UTF-8 bytes as `load_corpus` documents; errors name `source` and the byte offset."""
    nul = raw.find(b"\0")
    if nul >= 0:
        raise InputError(
            f"{source} has a NUL at byte {nul}: it is not plain text; give UTF-8 text files only"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"0x{raw[error.start]:02x}"
        raise InputError(
            f"{source} is not UTF-8: invalid byte {byte} at byte {error.start}; convert the file to UTF-8"
        ) from None
    return text.removeprefix(BOM.decode("utf-8")).replace("\r\n", "\n")


def _resolve(given: str) -> tuple[str, str | None]:
    """Split `given` into a corpus name or existing path and the one split asked for, if any."""
    head, _, tail = given.rstrip("/").rpartition("/")
    base, split = (head, tail) if head and tail in SPLITS else (given, None)
    if base in CORPORA:
        return base, split
    if os.path.exists(given):
        return given, None  # a real folder called "valid" is a path like any other
    if split and os.path.exists(base):
        return base, split
    known = ", ".join(CORPORA)
    raise InputError(
        f"no corpus or path {given!r}; known corpora: {known}{nearest(base, CORPORA)}; "
        "or give an existing UTF-8 text file or folder"
    )


def _shipped(name: str, split: str) -> bytes:
    return files("twoaxis.data").joinpath("corpora", f"{name}-{split}.txt").read_bytes()


def _read_path(path: Path) -> list[str]:
    """The non-empty documents of a file or folder, in a fixed order."""
    paths = [path]
    if path.is_dir():
        try:
            inside = [p for p in path.rglob("*") if p.is_file()]
        except OSError as error:
            raise InputError(
                f"cannot read {error.filename}: {error.strerror}; check its permissions"
            ) from None
        visible = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        paths = sorted(visible, key=lambda p: os.fsencode(p.relative_to(path).as_posix()))
    size = sum(p.stat().st_size for p in paths)
    if size > LARGEST:
        raise InputError(
            f"{path} holds {size / 1e9:.0f} GB and texts are read into memory; give {LARGEST / 1e9:.0f} GB at most"
        )
    documents = []
    for file in paths:
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}; check its permissions") from None
        documents.append(decode_text(raw, str(file)))
    documents = [text for text in documents if text]
    if not documents:
        raise InputError(f"{path} holds no text; give a UTF-8 text file, or a folder with at least one")
    return documents


def _hold_out(documents: list[str], fraction: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split off at most the last `fraction` of all bytes; a document across the cut is divided."""
    raw = [text.encode("utf-8") for text in documents]
    total = sum(map(len, raw))
    left = total - int(total * fraction)  # bytes that are still to go to the training split
    train, valid = [], []
    for document in raw:
        cut = min(max(left, 0), len(document))
        while cut < len(document) and document[cut] & 0xC0 == 0x80:  # inside a character: 0b10xxxxxx follows
            cut += 1
        train.append(document[:cut].decode("utf-8"))
        valid.append(document[cut:].decode("utf-8"))
        left -= len(document)
    return tuple(filter(None, train)), tuple(filter(None, valid))
