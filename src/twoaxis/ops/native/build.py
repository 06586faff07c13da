"""A kernel's C++ file becomes a library in the cache folder, on first use, by the system's compiler.

A library is named by what it was made from: the source and the headers, the compiler, the flags and the features of
the processor, so a cache that several machines share never gives one of them another's code. It appears by an
atomic rename, so any number of processes may build at once.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from ...folders import cache_folder
from . import levels

HERE = Path(__file__).parent
REFUSED = "cannot compile"  # in the reason: the compiler is there, and the source is at fault or the compiler is old
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-O3", "-mtune=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi",
)  # fmt: skip


class UnavailableError(Exception):
    """One line: why there is no kernel here."""


def library(name: str, flags: tuple[str, ...] | None = None) -> ctypes.CDLL:
    """The library of a kernel, built if it is not in the cache, for the level of `levels` unless `flags` are given.

    Raises UnavailableError, and InputError for a level that cannot be had.
    """
    machine, system = platform.machine(), platform.system()
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise UnavailableError(f"kernels are built on Linux on x86-64, not on {system} on {machine}")
    flags = (*FLAGS, *(levels.FLAGS[levels.level()] if flags is None else flags))
    compiler, folder = _compiler(), cache_folder()
    if folder is None:
        raise UnavailableError("there is no home folder to build in; set TWOAXIS_CACHE to a writable folder")
    path = folder / "native" / f"{name}-{_key(name, compiler, flags)}.so"
    try:
        if path.exists():
            try:
                return _load(path)
            except OSError:  # damaged
                path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _build(name, compiler, flags, path)
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise UnavailableError(
            f"{path.parent} cannot be used ({reason}); set TWOAXIS_CACHE to another"
        ) from None


def _load(path: Path) -> ctypes.CDLL:
    owner = path.stat().st_uid
    if owner not in (os.getuid(), 0):
        raise UnavailableError(f"{path} belongs to another user; set TWOAXIS_CACHE to a folder of your own")
    return ctypes.CDLL(str(path))


def _build(name: str, compiler: str, flags: tuple[str, ...], path: Path) -> ctypes.CDLL:
    handle, made = tempfile.mkstemp(suffix=".so", prefix=f".{name}-", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *flags, str(HERE / f"{name}.cpp"), "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise UnavailableError(f"{compiler} {REFUSED} {name}.cpp: {said.strip()}")
        os.replace(made, path)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{compiler} did not finish {name}.cpp in ten minutes") from None
    finally:
        Path(made).unlink(missing_ok=True)
    return _load(path)


def _compiler() -> str:
    """$CXX or the first of the usual ones."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise UnavailableError(f"there is no C++ compiler ({', '.join(names)}); install one or set CXX")
    return found


def _key(name: str, compiler: str, flags: tuple[str, ...]) -> str:
    about = os.stat(compiler)
    parts = [
        (HERE / f"{name}.cpp").read_bytes(),
        *(header.read_bytes() for header in sorted(HERE.glob("*.h"))),
        f"{os.path.realpath(compiler)} {about.st_size} {about.st_mtime_ns} {flags} {levels.features()}".encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
