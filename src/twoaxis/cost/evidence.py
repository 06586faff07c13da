"""What has been published about each method: data with sources, that a user can extend.

`evidence.yaml` is a list of results, one a line; a user's file of the same form is added to it. A result is
contested when something speaks against it, and single when no more than one run is reported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from twoaxis import spec
from twoaxis.errors import InputError, nearest

SPEEDS = ("speed", "step time", "memory")  # results on price, not on quality
OPTIONAL = ("parameters", "tokens", "via", "contested")  # texts that may be null
TEXTS = ("method", "metric", "model", "source", *OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One published result of a method against its baseline.

    method: a spec of either axis; kind: its bare name. value, baseline: None for a report without numbers.
    seeds: runs behind the value, None where the source names none. who: measured it. via: how it was read, if not
    in the source itself. contested: what speaks against it.
    """

    method: str
    metric: str
    value: float | None
    baseline: float | None
    better: Literal["lower", "higher"]
    model: str
    parameters: str | None
    tokens: str | None
    seeds: int | None
    who: Literal["authors", "others"]
    source: str
    via: str | None = None
    contested: str | None = None

    @property
    def kind(self) -> str:
        """The method's name without its options."""
        return self.method.split("(")[0]

    @property
    def single(self) -> bool:
        """One run, or none named."""
        return (self.seeds or 1) < 2

    @property
    def gain(self) -> float | None:
        """How much better than the baseline, as a share of it (of one where that is 0); None without numbers."""
        if self.value is None or self.baseline is None:
            return None
        change = (self.value - self.baseline) / (abs(self.baseline) or 1.0)
        return change if self.better == "higher" else -change

    @property
    def scale(self) -> float:
        """Parameters as a number, 0 where none are stated: what makes one result weigh more than another."""
        found = re.match(r"(\d+(?:\.\d+)?)([MB])", self.parameters or "")
        return float(found[1]) * {"M": 1e6, "B": 1e9}[found[2]] if found else 0.0

    @property
    def about_price(self) -> bool:
        """Whether it is a result on speed or memory."""
        return any(word in self.metric for word in SPEEDS)

    def words(self) -> str:
        """The result in a line."""
        number = "" if self.value is None else f" {self.value:g}"
        number += "" if self.baseline is None or self.value is None else f" against {self.baseline:g}"
        size = ", ".join(
            x for x in (self.model, self.parameters, self.tokens and f"tokens: {self.tokens}") if x
        )
        runs = f"{self.seeds} runs" if self.seeds and self.seeds > 1 else "one run or not stated"
        marks = [self.who, runs, *([self.via] if self.via else [])]
        marks += [f"contested: {self.contested}"] if self.contested else []
        return f"{self.metric}{number} ({size}; {self.source}; {'; '.join(marks)})"

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data, with the marks."""
        return asdict(self) | {"single": self.single, "gain": self.gain}


def evidence(extra: Path | None = None) -> list[Result]:
    """All results: the package's and those of a user's file; InputError for a file that does not fit."""
    own = files("twoaxis.cost").joinpath("evidence.yaml").read_text(encoding="utf-8")
    results = _parse(own, "evidence.yaml")
    if extra is not None:
        try:
            results += _parse(extra.read_text(encoding="utf-8"), str(extra))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{extra} cannot be read ({error}); give a YAML list of results") from None
    return results


def about(results: list[Result], method: str) -> list[Result]:
    """The results of a method: those of exactly its spec first, then those of its name."""
    exact = [r for r in results if r.method == method]
    return exact + [r for r in results if r.method != method and r.kind == method.split("(")[0]]


def strongest(results: Iterable[Result]) -> Result | None:
    """The result on quality that weighs most: uncontested before contested, then by the model's size."""
    numbers = [r for r in results if r.gain is not None and not r.about_price]
    return max(numbers, key=lambda r: (not r.contested, r.scale), default=None)


def _parse(text: str, where: str) -> list[Result]:
    import yaml

    try:
        rows = yaml.safe_load(text) or []
    except yaml.YAMLError as error:
        raise InputError(
            f"{where} is no YAML ({' '.join(str(error).split())}); give a list of results"
        ) from None
    if not isinstance(rows, list):
        raise InputError(f"{where} holds no list; give one result an entry, as docs/guides/advise.md shows")
    return [_result(row, f"{where}, entry {i + 1}") for i, row in enumerate(rows)]


def _result(row: Any, where: str) -> Result:
    known = {f.name: f.default is MISSING for f in fields(Result)}
    if not isinstance(row, dict):
        raise InputError(f"{where} is no table of fields; known: {', '.join(known)}")
    for key in row:
        if key not in known:
            raise InputError(f"{where}: a result has no field {key!r}; {nearest(str(key), known)}")
    lacking = [name for name, needed in known.items() if needed and name not in row]
    if lacking or not row.get("source"):
        raise InputError(
            f"{where} lacks {', '.join(lacking) or 'a source'}: a result without a source is not taken"
        )
    for name, allowed in (("better", ("lower", "higher")), ("who", ("authors", "others"))):
        if row[name] not in allowed:
            raise InputError(f"{where}: {name}={row[name]!r}: allowed is {' or '.join(allowed)}")
    for name in ("value", "baseline"):
        if row[name] is not None and not _finite(row[name]):
            raise InputError(f"{where}: {name}={row[name]!r}: allowed is a number or null")
    for name in TEXTS:
        value = row.get(name, None if name in OPTIONAL else "")
        if not isinstance(value, str) and not (value is None and name in OPTIONAL):
            kind = "text or null" if name in OPTIONAL else "text"
            raise InputError(f"{where}: {name}={value!r}: allowed is {kind}, in quotes where it is a number")
    if row["seeds"] is not None and (type(row["seeds"]) is not int or row["seeds"] < 1):
        raise InputError(f"{where}: seeds={row['seeds']!r}: allowed is an integer of 1 or more, or null")
    _known_method(row["method"], where)
    return Result(**row)


def _finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def _known_method(text: str, where: str) -> None:
    axes: tuple[spec.Axis, ...] = ("depth", "sequence")
    for axis in axes:
        if text.split("(")[0] in spec.methods(axis):
            spec.parse_spec(axis, text)
            return
    names = [name for axis in axes for name in spec.methods(axis)]
    raise InputError(f"{where}: method {text!r} is not known; {nearest(text, names)}")
