"""Reading a configuration file: YAML in, and every key that is not a field refused with a hint."""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any, Literal

import yaml

from twoaxis import spec
from twoaxis.errors import InputError

AXES: tuple[Literal["depth", "sequence"], ...] = ("depth", "sequence")


class _Loader(yaml.SafeLoader):
    """YAML with the floats of its version 1.2, so that 1e-3 is a number, and no key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{twice[0]!r} is given twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; unreadable files, repeated keys and other content raise InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}; give a UTF-8 YAML file") from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply; give lines of `field: value`") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold lines of `field: value`")
    return data


def check_keys(data: Any, mine: list[str], models: list[str], source: str) -> None:
    """Refuse keys other than `mine`, and those under `model:` other than `models`.

    The error says where a misplaced key belongs, or which is nearest.
    """
    model = data.get("model") if isinstance(data, dict) else None
    if not isinstance(data, dict) or isinstance(model, str | int | float | list):
        raise InputError(f"{source} must be lines of `field: value`, with those of the model under `model:`")
    for place, keys, known in (("", data, mine), (" under `model:`", model, models)):
        for key in keys if isinstance(keys, dict) else ():
            if key not in known:
                raise InputError(f"{source} has no field {key!r}{place}; {_hint(str(key), mine, models)}")


def _hint(key: str, mine: list[str], models: list[str]) -> str:
    belongs = {
        f.name: f"is an option of a method, written as in '{name}({f.name}=...)'"
        for axis in AXES
        for name, method in spec.methods(axis).items()
        for f in dataclasses.fields(method.Config)  # type: ignore[attr-defined]
    }
    belongs |= dict.fromkeys(models, "belongs under `model:`")
    belongs |= dict.fromkeys(mine, "belongs at the top level")
    if key in belongs:
        return f"it {belongs[key]}"
    close = difflib.get_close_matches(key, belongs, n=1)
    return f"did you mean {close[0]!r}? it {belongs[close[0]]}" if close else f"known: {', '.join(mine)}"
