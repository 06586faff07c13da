"""The `twoaxis` command: finds the command's file, reads its options, turns errors into one line.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import codecs
import importlib
import os
import sys
import time
from collections.abc import Sequence
from io import StringIO
from typing import Any, TextIO

from twoaxis.errors import InputError, RunError, nearest

PATIENCE = 30.0  # seconds that other processes than the first leave it to speak
COMMANDS = {
    "compare": "train a grid of methods on the same data and write an honest report",
    "train": "train one model",
    "eval": "score a trained run on a text",
    "generate": "let a trained run write on",
    "freeze": "set each block of a trained hybrid to one axis",
    "report": "write the report of a comparison again, from its folder",
    "methods": "list the methods of both axes, with options and costs",
    "verify": "show in numbers that the two axes are one operator",
    "advise": "say which method to take, where, at what price",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `twoaxis` with these arguments (by default the process's) and return the exit code."""
    sys.stdout, sys.stderr = sys.stdout or StringIO(), sys.stderr or StringIO()  # None where closed: `>&-`
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except InputError as error:
        return _refuse(str(error))
    except RunError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", 130)
    except BrokenPipeError:  # the reader went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # whatever else a disk refuses
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        return _fail(f"not enough memory ({error}); make the model, batch_size or seq_len smaller", 1)


def _lacks_memory(error: Exception) -> bool:
    """Whether Python, or torch on any device, could not get memory."""
    named = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    return named or "can't allocate memory" in str(error)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        from twoaxis import __version__

        print(f"twoaxis {__version__}")
        return 0
    name = argv[0]
    if name not in COMMANDS:
        what = "an option" if name.startswith("-") else "a command"
        raise InputError(f"{name!r} is not {what}; {nearest(name, COMMANDS)}; see twoaxis --help")
    command = importlib.import_module(f"twoaxis.cli.{name}")
    from twoaxis.cli.options import parse

    args = parse(command.Args, argv[1:], f"twoaxis {name}")
    if args is None:
        return 0
    _check_environment()
    return int(command.run(args))


def _check_environment() -> None:
    """Refuse a wrong TWOAXIS_BACKEND or TWOAXIS_NATIVE before any work, also where no kernel would ask for it."""
    if os.environ.get("TWOAXIS_BACKEND"):
        from twoaxis.ops.choice import requested

        requested()
    if os.environ.get("TWOAXIS_NATIVE"):
        from twoaxis.ops.native.levels import level

        level()


def usage() -> str:
    """The text of `twoaxis --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: twoaxis COMMAND [options]",
            "",
            "How a Transformer carries information along depth and along the sequence.",
            "",
            *lines,
            "",
            "twoaxis COMMAND --help lists a command's options; twoaxis --version prints the version.",
            "Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.",
        ]
    )


def _refuse(message: str) -> int:
    """Say why the input is refused; of torchrun's processes the first says it, and torchrun then ends the others.

    One that is still there after PATIENCE was alone in it, and says so.
    """
    rank = int(os.environ.get("RANK", "0")) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if rank:
        time.sleep(PATIENCE)
        message = f"rank {rank}: {message}"
    return _fail(message, 2)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"twoaxis: {line}", file=sys.stderr)
    return code


PLAIN = dict.fromkeys("─━–—", "-") | dict.fromkeys("│┃║", "|") | dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼┏┓┗┛┳┻╋", "+")
PLAIN |= {"═": "=", "±": "+-", "×": "x", "…": "...", "·": ".", "≤": "<=", "≥": ">=", "→": "->", "↓": "v"}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Stand-ins in ASCII for what a terminal's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(PLAIN.get(c, "?") for c in missing), error.end


def _never_fail_to_encode(stream: TextIO | Any) -> None:
    codecs.register_error("twoaxis", _plain)
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="twoaxis")
