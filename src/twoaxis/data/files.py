"""Writing a file so that it is there whole or not at all."""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` to a new file beside `path`, then move it there; on an error nothing is left behind;
    an OSError says which file it was.

    Every call has its own temporary name, so processes that write the same path at once do not mix:
    the last one to finish wins, whole.
    """
    try:
        _write(path, chunks)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
