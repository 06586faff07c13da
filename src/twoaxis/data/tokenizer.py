"""Tokenisers: bytes by default, or a byte-level BPE trained on the corpus; one JSON text defines each."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twoaxis.data.checks import whole
from twoaxis.data.files import write_atomically
from twoaxis.errors import InputError

FILE = "tokenizer.json"


class Tokenizer(ABC):
    """Text to ids and back.

    `name` is its spec ("byte", "bpe:4096"), ids are 0 .. vocab_size-1, and `definition` is the JSON text that
    `save` writes and `fingerprint` hashes.
    """

    name: str
    vocab_size: int
    definition: str

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids (T,) of `text`; no token is added at either end. A lone surrogate raises InputError."""

    @abstractmethod
    def decode(self, ids: ArrayLike) -> str:
        """The text of ids (T,), invalid UTF-8 as U+FFFD. An id outside the vocabulary raises InputError."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the definition: equal exactly when two tokenisers are the same."""
        return hashlib.sha256(self.definition.encode("utf-8")).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` into `folder`, made if needed; `load_tokenizer` reads it back."""
        write_atomically(Path(folder) / FILE, [self.definition.encode("utf-8")])

    def _checked(self, ids: ArrayLike) -> list[int]:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InputError(
                f"decode takes one list of whole-number ids, not {array.ndim} axes of {array.dtype}"
            )
        for id_ in (array.min(), array.max()) if array.size else ():
            if not 0 <= id_ < self.vocab_size:
                raise InputError(
                    f"id {id_} is outside the vocabulary of {self.name}: 0 to {self.vocab_size - 1}"
                )
        return [int(id_) for id_ in array]


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte; the id is the byte."""

    name = "byte"
    vocab_size = 256
    definition = '{"type": "byte", "vocab_size": 256}\n'

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: ArrayLike) -> str:
        return bytes(self._checked(ids)).decode("utf-8", errors="replace")


class BPETokenizer(Tokenizer):
    """A BPE of the `tokenizers` library, given by the text of its `tokenizer.json`.

    A document is encoded whole; give a very large corpus as a folder of files to bound the memory.
    """

    def __init__(self, definition: str) -> None:
        from tokenizers import Tokenizer as Engine  # imported here: `import twoaxis` must not load it

        try:
            self._engine: Any = Engine.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"not a tokenizer.json of the tokenizers library ({error})") from None
        self._engine.no_truncation()
        self._engine.no_padding()
        self.definition = definition
        self.vocab_size = max(self._engine.get_vocab().values()) + 1
        self.name = f"bpe:{self.vocab_size}"

    def encode(self, text: str) -> NDArray[np.int64]:
        _utf8(text)
        return np.array(self._engine.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: ArrayLike) -> str:
        return str(self._engine.decode(self._checked(ids), skip_special_tokens=False))


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE of exactly `vocab_size` entries (256 bytes and the merges) on `texts`.

    Any text can be encoded and is decoded unchanged. InputError if the text is too small for so many merges.
    """
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    whole("the BPE vocabulary", vocab_size, least=257)
    engine: Any = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    engine.train_from_iterator(texts, trainer)
    found = engine.get_vocab_size()
    if found != vocab_size:
        raise InputError(
            f"this text yields a BPE vocabulary of {found}, not {vocab_size}; ask for bpe:{found} or less"
        )
    return BPETokenizer(engine.to_str())


def load_tokenizer(spec: str | Path, texts: Sequence[str] | None = None) -> Tokenizer:
    """`"byte"`, `"bpe:4096"` (trained on `texts`), or the tokeniser saved in a folder."""
    text = str(spec)
    if text == "byte":
        return ByteTokenizer()
    if text.startswith("bpe:"):
        size = text.removeprefix("bpe:")
        if not (size.isascii() and size.isdigit()):
            raise InputError(f"tokenizer {text!r}: a BPE is written bpe:SIZE, for example bpe:4096")
        if not texts:
            raise InputError(
                f"tokenizer {text!r} is trained on text and none was given; give text or a saved folder"
            )
        return train_bpe(texts, int(size))
    path = Path(spec) / FILE
    if not path.is_file():
        raise InputError(f"no tokenizer {text!r}; give byte, bpe:SIZE, or a folder that holds {FILE}")
    definition = path.read_bytes().decode("utf-8", errors="replace")
    if definition == ByteTokenizer.definition:
        return ByteTokenizer()
    try:
        json.loads(definition)
        return BPETokenizer(definition)
    except ValueError as error:  # InputError is one
        raise InputError(f"{path} ({path.stat().st_size} bytes) is damaged or foreign: {error}") from None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text has a lone surrogate at character {error.start}: decode it as UTF-8"
        ) from None
