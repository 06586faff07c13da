"""From arguments to a command's `Args`: tyro reads them, and what it refuses becomes one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from twoaxis.errors import InputError, nearest

T = TypeVar("T")


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take."""
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed {seed}: allowed is 0 to 2**63 - 1")


def parse(args_type: type[T], argv: Sequence[str], prog: str) -> T | None:
    """The command's arguments, or None after printing the help that was asked for.

    Raises InputError for unknown options (with the nearest), missing and malformed values.
    """
    import tyro

    _refuse_unknown_options(args_type, argv, prog)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args, rest = tyro.cli(
                args_type,
                args=list(argv),
                prog=prog,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if not end.code:
            return None  # --help was printed
        raise InputError(f"{_one_line(said.getvalue())}; see {prog} --help") from None
    if rest:
        raise InputError(f"unexpected argument {rest[0]!r}; see {prog} --help")
    sys.stderr.write(said.getvalue())
    return args


def _refuse_unknown_options(args_type: type, argv: Sequence[str], prog: str) -> None:
    known = [*_option_names(args_type), "--help"]
    for given in argv:
        if given == "--":
            return
        option = given.split("=", 1)[0]
        if option.startswith("--") and option.replace("_", "-") not in known:
            raise InputError(f"{prog} has no option {option!r}; {nearest(option, known)}")


def _option_names(args_type: type) -> list[str]:
    """`--name` of every field that is not positional; `--no-name` of a flag that is on by default."""
    import tyro

    positional = typing.get_args(tyro.conf.Positional[int])[1]
    hints = typing.get_type_hints(args_type, include_extras=True)
    names = []
    for f in dataclasses.fields(args_type):
        extras = getattr(hints[f.name], "__metadata__", ())
        if positional not in extras:
            given = next((extra.name for extra in extras if getattr(extra, "name", None)), f.name)
            names.append(f"--{'no-' if f.default is True else ''}{given.replace('_', '-')}")
    return names


def _one_line(box: str) -> str:
    """What tyro drew as a box of error sections, as a line: the complaint, then what is allowed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│|╭╮╰╯ ") for line in text.splitlines()]
    sections: list[list[str]] = [[]]
    for line in lines[1:]:  # the first is the title
        if line.strip("─-"):
            sections[-1].append(line)
        elif sections[-1]:
            sections.append([])
    complaint = " ".join(sections[0]).rstrip(".") or "cannot read the arguments"
    for section in sections[1:]:
        if section[:1] == ["Argument helptext:"] and len(section) > 1:
            return f"{complaint}; allowed is {section[1]}"
    return complaint


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
