"""From a corpus to token files, built once and kept in a cache folder."""

import hashlib
import logging
import re
from pathlib import Path

from twoaxis.data.corpora import Corpus
from twoaxis.data.tokenizer import Tokenizer
from twoaxis.data.tokens import VERSION, TokenFile, tokenize
from twoaxis.folders import cache_folder

__all__ = ["cache_folder", "prepare"]

log = logging.getLogger(__name__)


def prepare(
    corpus: Corpus, tokenizer: Tokenizer, cache: str | Path | None = None
) -> tuple[TokenFile, TokenFile]:
    """The token files of both splits, from the cache if they are there, else built and kept there.

    `cache` is a folder, by default `cache_folder()`. Files are named by the content of text and tokeniser, so
    nothing stale is ever read, and written atomically, so several processes may build at once. Where the
    folder cannot be written the tokens stay in memory and one line is logged as a warning. An empty split
    gives a file without tokens. A damaged file raises RunError.
    """
    folder = Path(cache) if cache is not None else cache_folder()
    trouble = "there is no home folder" if folder is None else ""
    splits = []
    for split, texts in (("train", corpus.train), ("valid", corpus.valid)):
        name = _file_name(corpus.name, split, texts, tokenizer)
        tokens = None
        try:
            if folder and (folder / name).exists():
                tokens = TokenFile.read(folder / name)
            else:
                tokens = tokenize(texts, tokenizer)
                tokens = tokens.write(folder / name) if folder else tokens
        except OSError as error:
            trouble = f"{folder} cannot be used ({error.strerror})"
        splits.append(tokens or tokenize(texts, tokenizer))
    if trouble:
        log.warning(
            "tokens are kept in memory, not cached: %s; set TWOAXIS_CACHE to a writable folder", trouble
        )
    return splits[0], splits[1]


def _file_name(corpus: str, split: str, texts: tuple[str, ...], tokenizer: Tokenizer) -> str:
    key = hashlib.sha256(f"{VERSION} {tokenizer.fingerprint}".encode())
    for text in texts:
        key.update(hashlib.sha256(text.encode("utf-8")).digest())
    label = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{'-'.join(Path(corpus).parts[-2:])}-{tokenizer.name}")[:80]
    return f"{label}-{split}-{key.hexdigest()[:24]}.tokens"
