"""The registry of methods on both axes, their typed options, and the one-line specs that name them.

A spec is a name or a call with literal keyword arguments, `"ddl(value_dim=4)"`. It is read with `ast`
and never evaluated. `"parallel(attention, mlp)"` takes other specs as positional arguments.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import sys
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from twoaxis.errors import InputError, nearest
from twoaxis.types import Coordinates, Cost, Shape, StandardStart

Axis = Literal["depth", "sequence"]
_METHODS: dict[str, dict[str, type]] = {"depth": {}, "sequence": {}}
_ALIASES: dict[str, dict[str, str]] = {"depth": {}, "sequence": {}}
T = TypeVar("T", bound=type)
LONGEST = 2000  # characters of a spec


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
class Config:
    """Options of a method. Every subclass is made a frozen, keyword-only dataclass, nested in its method."""

    axis: ClassVar[str] = ""
    name: ClassVar[str] = ""
    specs_field: ClassVar[str | None] = None  # the field that takes positional specs

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        cls: Any = type(self)
        hints = _hints(cls)
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, f.name, checked(self.name, f.name, getattr(self, f.name), hints[f.name]))
        self.check()

    def check(self) -> None:
        """Refuse values that the types allow and the method does not."""

    def spec(self) -> str:
        """The one-line spec: the name with the options that differ from their defaults."""
        args = []
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name == self.specs_field:
                args += list(value)
            elif value != f.default:
                args.append(f"{f.name}={list(value) if isinstance(value, tuple) else value!r}")
        return f"{self.name}({', '.join(args)})" if args else self.name

    def coordinates(self) -> Coordinates:
        """Where the method stands on the duality paper's map."""
        raise NotImplementedError

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """Counts from the options alone: a depth method's over the network, a core's in one block."""
        raise NotImplementedError

    def standard_start(self) -> StandardStart:
        """Whether a freshly built model equals the standard pre-norm Transformer."""
        return "no"


def register(axis: Axis, name: str) -> Callable[[T], T]:
    """Class decorator: make a method known by `name` on `axis`. It must own a nested `Config`."""

    def add(cls: T) -> T:
        config: Any = cls.__dict__.get("Config") or type("Config", (cls.Config,), {})  # type: ignore[attr-defined]
        config.axis, config.name = axis, name
        config.__qualname__ = f"{cls.__qualname__}.Config"
        cls.Config, cls.method_name = config, name  # type: ignore[attr-defined]
        _METHODS[axis][name] = cls
        _parsed.cache_clear()
        return cls

    return add


def alias(axis: Axis, name: str, method: str) -> None:
    """Let specs say `name` for a registered method, e.g. the name that its paper uses."""
    _ALIASES[axis][name] = method


def unregister(axis: Axis, name: str) -> None:
    """Forget a method, e.g. one defined for a moment in a notebook or a test."""
    _METHODS[axis].pop(name, None)
    _parsed.cache_clear()


def methods(axis: Axis) -> dict[str, type]:
    """All registered methods of one axis, name -> class (with `.Config`), in order of registration."""
    _check_axis(axis)
    return dict(_registered(axis))


def _check_axis(axis: str) -> None:
    if axis not in _METHODS:
        raise InputError(f"axis {axis!r} is unknown; use 'depth' or 'sequence'")


def _registered(axis: Axis) -> dict[str, type]:
    """The registry of an axis, after its room has filled it."""
    importlib.import_module(f"twoaxis.{axis}")
    return _METHODS[axis]


def method(axis: Axis, name: str) -> Any:
    """The method class called `name`, or an error that lists what exists."""
    known = _registered(axis)
    name = _ALIASES[axis].get(name, name)
    if name not in known:
        raise InputError(f"{axis} method {name!r} is unknown; {nearest(name, known)}")
    return known[name]


def options(config: Any) -> dict[str, tuple[str, Any]]:
    """Each option of a method: what is allowed, in words, and its default."""
    hints = _hints(config)
    return {f.name: (_spell(hints[f.name]), f.default) for f in dataclasses.fields(config)}


def parse_spec(axis: Axis, text: str | Config) -> Any:
    """The Config that a one-line spec names, e.g. `parse_spec("depth", "ddl(value_dim=4)")`.

    Raises InputError for malformed text, unknown names or arguments (with the nearest match) and bad values.
    """
    if isinstance(text, Config):
        if text.axis != axis:
            raise InputError(f"{text.spec()!r} is a {text.axis} method, not one of the {axis} axis")
        return text
    _check_axis(axis)
    if not isinstance(text, str) or len(text) > LONGEST:
        given = f"{len(text)} characters" if isinstance(text, str) else repr(text)
        raise InputError(f"a {axis} spec must be a line of text such as 'name(option=1)', not {given}")
    return _parsed(axis, text)


@functools.lru_cache(maxsize=1024)  # forgotten whenever the registry changes
def _parsed(axis: Axis, text: str) -> Any:
    name, positional, options = _read_call(text)
    config = method(axis, name).Config
    if positional:
        if config.specs_field is None:
            raise InputError(f"{text!r}: options of {name} need a name, as in {name}(option=value)")
        if config.specs_field in options:
            raise InputError(f"{text!r} gives {config.specs_field!r} twice")
        options[config.specs_field] = tuple(positional)
    known = [f.name for f in dataclasses.fields(config)]
    for key in options:
        if key not in known:
            raise InputError(f"{name} has no option {key!r}; {nearest(key, known)}")
    try:
        return config(**options)
    except RecursionError:
        raise InputError(f"{text!r} is nested too deeply") from None


def _read_call(text: str) -> tuple[str, list[str], dict[str, Any]]:
    wrong = f"cannot read {text!r} as a method: write name or name(option=value, ...) with literal values"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python comments on odd literals; they are refused below
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise InputError(wrong) from None
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if isinstance(node, ast.Tuple):
        apart = " ".join(repr(ast.unparse(part)) for part in node.elts)
        raise InputError(f"cannot read {text!r} as one method; give several apart: {apart}")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise InputError(wrong)
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise InputError(wrong)
        if keyword.arg in options:
            raise InputError(f"{text!r} gives {keyword.arg!r} twice")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise InputError(f"{text!r}: the value of {keyword.arg!r} is not a literal") from None
    try:
        positional = [
            a.value if isinstance(a, ast.Constant) and isinstance(a.value, str) else ast.unparse(a)
            for a in node.args
        ]
    except RecursionError:
        raise InputError(wrong) from None
    return node.func.id, positional, options


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def checked(method_name: str, field: str, value: Any, hint: Any) -> Any:
    """The value, lists made tuples and ints floats where the hint says so; InputError if it does not fit."""
    fitted = _fitted(value, hint)
    if fitted is _MISFIT:
        raise InputError(f"{method_name}({field}={value!r}): allowed is {_spell(hint)}")
    return fitted


_MISFIT = object()


def _fitted(value: Any, hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value if any(value == a and type(value) is type(a) for a in args) else _MISFIT
    if origin in (typing.Union, types.UnionType):
        ways = [_fitted(value, a) for a in args]
        return (
            value
            if any(way is value for way in ways)
            else next((w for w in ways if w is not _MISFIT), _MISFIT)
        )
    if origin is tuple:
        items = tuple(_fitted(v, args[0]) for v in value) if isinstance(value, tuple | list) else (_MISFIT,)
        return _MISFIT if any(item is _MISFIT for item in items) else items
    if hint is float and type(value) in (int, float):
        return float(value) if abs(value) <= sys.float_info.max else _MISFIT
    return value if type(value) is (type(None) if hint is None else hint) else _MISFIT


def _spell(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(a) for a in args)
    if origin is tuple:
        return f"list of {_spell(args[0])}"
    if hint is float:
        return "a finite number"
    return "None" if hint in (None, type(None)) else getattr(hint, "__name__", str(hint))
