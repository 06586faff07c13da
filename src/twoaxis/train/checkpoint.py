"""Checkpoint folders that are there whole or not at all.

    checkpoints/step-00000200/{model.safetensors, config.json, state.safetensors, state.json, COMPLETE}
    checkpoints/step-00000200/{shard-00000.safetensors, .., index.json, config.json, state.json, COMPLETE}

Files are written and synced in a folder of another name, the marker COMPLETE (size and SHA-256 of every file)
last; then the folder is renamed. Only a folder whose marker agrees with its files counts; the contents are
compared when a checkpoint is about to be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from twoaxis.errors import RunError

MARKER = "COMPLETE"
PREFIX = "step-"


def save_checkpoint(
    folder: Path, step: int, files: dict[str, bytes], keep: int, keep_every: int | None = None
) -> Path:
    """Write `files` as the checkpoint of `step` in `folder`, then `prune`.

    When writing fails the earlier checkpoints stay, the partial files go, and RunError says what was needed.
    """
    target = folder_of(folder, step)
    if problem(target) is not None:
        temporary = folder / f".{target.name}.{os.getpid()}"
        try:
            temporary.mkdir(parents=True)
            for name, data in files.items():
                write_synced(temporary / name, data)
            marks = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()}
            commit(temporary, target, marks)
        except OSError as error:
            raise RunError(cannot_save(folder, step, sum(map(len, files.values())), error)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    prune(folder, keep, keep_every)
    return target


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"{PREFIX}{step:08d}"


def commit(temporary: Path, target: Path, marks: dict[str, list[Any]]) -> None:
    """Make a folder whose files are written and synced the checkpoint `target`. marks: [size, SHA-256] by file."""
    write_synced(temporary / MARKER, json.dumps(marks).encode())
    sync_folder(temporary)
    if target.exists():
        remove(target)
    os.replace(temporary, target)
    sync_folder(target.parent)


def prune(folder: Path, keep: int, keep_every: int | None = None) -> None:
    """Delete all complete checkpoints but the newest `keep` and those of every `keep_every`-th step."""
    for old in complete(folder)[:-keep]:
        if keep_every is None or step_of(old) % keep_every:
            remove(old)


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, if any, and each folder that does not count, as "name: why"."""
    skipped = []
    for path in sorted(folder.glob(f"{PREFIX}*")) + sorted(folder.glob(f".{PREFIX}*")):
        why = "was being written" if path.name.startswith(".") else problem(path)
        if why is not None:
            skipped.append(f"{path.name}: {why}")
    for path in reversed(complete(folder)):
        why = altered(path)
        if why is None:
            return path, skipped
        skipped.append(f"{path.name}: {why}")
    return None, skipped


def remove_unfinished(folder: Path) -> None:
    """Delete what an interrupted save left behind under its temporary name."""
    for path in folder.glob(f".{PREFIX}*"):
        remove(path)


def complete(folder: Path) -> list[Path]:
    """Every complete checkpoint, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if problem(path) is None]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint folder is of."""
    return int(path.name.removeprefix(PREFIX))


def problem(path: Path) -> str | None:
    """Why a folder is not a complete checkpoint, or None."""
    number = path.name.removeprefix(PREFIX)
    if not (number.isascii() and number.isdigit()):
        return "is not called step-NUMBER"
    try:
        marks = json.loads((path / MARKER).read_text(encoding="utf-8"))
        for name, (size, _) in marks.items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
    except FileNotFoundError as error:
        return f"has no {Path(error.filename).name}"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"cannot be read ({error})"
    return None


def altered(path: Path) -> str | None:
    """Which file of a complete checkpoint no longer holds what was written, or None."""
    for name, (_, digest) in json.loads((path / MARKER).read_text(encoding="utf-8")).items():
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} is not what was written"
    return None


def remove(path: Path) -> None:
    """Delete a checkpoint, its marker first, so that it never looks complete while files are missing."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk, where the system can do that."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cannot_save(folder: Path, step: int, needed: int, error: OSError) -> str:
    """One line on a failed save: what it needs and what is free."""
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    return (
        f"cannot save step {step} in {folder}: {error.strerror or error}; it needs {needed} bytes and "
        f"{free} are free; make room or raise the file size limit, then go on with --resume"
    )
