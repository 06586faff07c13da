"""Machines: what they multiply, move, hold and send, each figure with its source.

Presets are peaks from `hardware.json`; a figure without a source is unknown (None) and what needs it is left out
of a prediction, which says so. A calibration (`calibrate.py`) is a machine as well, with rates as they were
measured at several sizes.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from twoaxis.errors import InputError, nearest

Curve = tuple[tuple[float, float], ...]  # (size, rate) by size


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its connections.

    matrix_tflops: 1e12 FLOPs a second of matrix products, by dtype. memory_gb_per_s, memory_gb: of its own
    memory. link_gb_per_s: to `link_devices` devices around it, in one direction; network_gb_per_s: to others.
    launch_us: microseconds to start one kernel; asynchronous: while the device computes. Units are decimal.

    As measured, None or empty for presets: gemm_curve: (FLOPs of one float32 product, 1e12 FLOPs a second);
    batched_tflops: of a small matrix for each token; native_tflops: of this package's kernels for CPUs; copy_curve:
    (bytes read and written by one kernel, GB a second) of arrays that were just used; cold_gb_per_s: of arrays that
    have left the caches; softmax_gb_per_s: bytes that a softmax reads and writes, and other functions made of
    exponentials.
    """

    name: str
    title: str = ""
    asynchronous: bool = True
    matrix_tflops: dict[str, float | None] = field(default_factory=dict)
    memory_gb_per_s: float | None = None
    memory_gb: float | None = None
    link_gb_per_s: float | None = None
    link_devices: int | None = None
    network_gb_per_s: float | None = None
    launch_us: float | None = None
    gemm_curve: Curve = ()
    copy_curve: Curve = ()
    softmax_gb_per_s: float | None = None
    batched_tflops: float | None = None
    native_tflops: float | None = None
    cold_gb_per_s: float | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def matrix_rate(self, dtype: str, flops: float = math.inf) -> float:
        """FLOPs a second of one matrix product of `flops`; InputError where that dtype's rate is unknown."""
        rate = self.matrix_tflops.get(dtype)
        if rate is None:
            known = [name for name, value in self.matrix_tflops.items() if value]
            raise InputError(
                f"{self.name} has no known {dtype} matrix rate; known are {', '.join(known) or 'none'}: "
                f"give one with --dtype, or measure the machine with --measure"
            )
        measured = _at(self.gemm_curve, flops) if dtype == "float32" else None
        return 1e12 * (measured or rate)

    def memory_rate(self, nbytes: float = math.inf, cold: bool = False) -> float:
        """Bytes a second of a kernel that moves `nbytes`, just used or `cold`."""
        rate = _at(self.copy_curve, nbytes) or self.memory_gb_per_s
        if rate is None:
            raise InputError(f"{self.name} has no known memory bandwidth; add memory_gb_per_s to its file")
        return 1e9 * min(rate, self.cold_gb_per_s or rate) if cold else 1e9 * rate

    def send_rate(self, devices: int) -> float | None:
        """Bytes a second between neighbours in a group of so many devices; None if it is unknown."""
        inside = self.link_devices is None or devices <= self.link_devices
        rate = self.link_gb_per_s if inside else self.network_gb_per_s
        return None if rate is None else 1e9 * rate

    def unknown(self) -> list[str]:
        """The figures that nobody has given."""
        named = ("memory_gb_per_s", "memory_gb", "link_gb_per_s", "network_gb_per_s", "launch_us")
        return [name for name in named if getattr(self, name) is None]

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str) -> Hardware:
        """The inverse of `to_dict`; InputError for unknown keys and for figures that are not positive numbers."""
        known = [f.name for f in fields(cls)]
        for key, value in data.items():
            kind = TYPES.get(key)
            if kind is not None and type(value) is not kind:
                raise InputError(f"{where}: {key}={value!r}: allowed is {NAMES[kind]}")
            if key not in known:
                raise InputError(f"{where}: a machine has no field {key!r}; {nearest(str(key), known)}")
            if (
                key.endswith(("_s", "_gb", "_us", "_devices", "batched_tflops", "native_tflops"))
                and value is not None
            ):
                _positive(where, key, value)
        rates = data.get("matrix_tflops", {})
        for dtype, value in rates.items():
            if value is not None:
                _positive(where, f"matrix_tflops.{dtype}", value)
        curves = {k: _curve(where, k, data[k]) for k in CURVES if k in data}
        return cls(**{**data, **curves})


CURVES = ("gemm_curve", "copy_curve")
TYPES = {"name": str, "title": str, "asynchronous": bool, "matrix_tflops": dict, "sources": dict}
NAMES = {str: "text", bool: "true or false", dict: "a table"}


def _curve(where: str, key: str, value: Any) -> Curve:
    pairs = value if isinstance(value, list | tuple) else [value]
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"{where}: {key} has {pair!r}: allowed are pairs of a size and a rate")
        for number in pair:
            _positive(where, key, number)
    if any(x0 >= x1 for (x0, _), (x1, _) in itertools.pairwise(pairs)):
        raise InputError(f"{where}: {key}: give its pairs in the order of their sizes, each size once")
    return tuple((float(x), float(y)) for x, y in pairs)


def _positive(where: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{where}: {key}={value!r}: allowed is a positive number, or null for unknown")


def _at(curve: Curve, size: float) -> float | None:
    """The rate at a size: linear in its logarithm between measured sizes, constant outside of them."""
    if not curve:
        return None
    if size <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if size <= x1:
            return y0 + (y1 - y0) * math.log(size / x0) / math.log(x1 / x0)
    return curve[-1][1]


def presets() -> dict[str, Hardware]:
    """All machines that the package knows, by name."""
    data = json.loads(files("twoaxis.cost").joinpath("hardware.json").read_text(encoding="utf-8"))
    return {
        name: Hardware.from_dict({"name": name, **row}, f"hardware.json, {name}")
        for name, row in data.items()
    }


def hardware(name: str) -> Hardware:
    """A preset by name, or the machine in a JSON file (as `twoaxis advise --measure FILE` writes it)."""
    known = presets()
    if name.lower() in known:
        return known[name.lower()]
    path = Path(name)
    if path.suffix != ".json":
        raise InputError(
            f"hardware {name!r} is not known; {nearest(name, known)}; or a .json file that --measure wrote"
        )
    return read_machine(path)


def read_machine(path: Path) -> Hardware:
    """The machine in a JSON file; InputError if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is no machine's file ({error}); write one with twoaxis advise --measure"
        ) from None
    if not isinstance(data, dict) or "name" not in data:
        raise InputError(
            f"{path} is no machine's file: it has no name; write one with twoaxis advise --measure"
        )
    return Hardware.from_dict(data, str(path))
