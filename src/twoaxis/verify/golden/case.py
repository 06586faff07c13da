"""One recorded case: a file of tensors from a method's own public code, and the JSON that explains it.

A runner takes inputs and parameters from the case, computes with this library's public classes and hands the
results back. What it took and gave is then held to the file, in `check.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


class NotRun(Exception):  # noqa: N818 - a verdict, not an error
    """Why a case was not run: a method, an option or a file that this version does not know."""


@dataclass
class Case:
    """name: folder/file without suffix. meta: the JSON. tensors: the file's, in its own dtypes.

    A tensor's role follows from its name: `grad.X`, `d_X`, `dX` is the gradient of X; `cot.X`, `cot`,
    `cotangent`, `cotangent.i` and `cot.last` (of the last output) the cotangent of an output. Everything else
    is an input, a parameter or an output.
    """

    name: str
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    @property
    def stem(self) -> str:
        """The file's name without folder and suffix."""
        return self.name.rsplit("/", 1)[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the case: the widest floating one in the file."""
        dtypes = [t.dtype for t in self.tensors.values() if t.is_floating_point()]
        return max(dtypes, key=lambda d: torch.finfo(d).bits, default=torch.float32)

    def leaf(self, name: str) -> Tensor:
        """An input or parameter of the file as a leaf that wants a gradient; the same leaf each time."""
        if name not in self.leaves:
            self.leaves[name] = self.value(name).clone().requires_grad_()
        return self.leaves[name]

    def value(self, name: str) -> Tensor:
        """An input of the file that needs no gradient (ids, angles, recorded activations)."""
        if name not in self.tensors:
            raise NotRun(f"the file has no tensor {name!r}")
        result = name in ("out", "output") or name.startswith(("out.", "out_"))
        if self.gradient_of(name) or self.cotangent_of(name) or result:
            raise ValueError(f"{name!r} is a result of the file, not an input")
        self.taken.add(name)
        return self.tensors[name]

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return name in self.tensors

    def names(self, prefix: str) -> list[str]:
        """The file's tensors whose name starts with `prefix`, in natural order (2 before 10)."""
        found = [name for name in self.tensors if name.startswith(prefix)]
        return sorted(
            found, key=lambda n: [(p.isdigit(), int(p) if p.isdigit() else p) for p in n.split(".")]
        )

    def bind(self, module: nn.Module, values: Mapping[str, Tensor]) -> None:
        """Replace parameters of a module by tensors made from leaves: {"path.to.parameter": tensor}."""
        for path, value in values.items():
            where, _, name = path.rpartition(".")
            owner = module.get_submodule(where)
            parameter = owner._parameters.pop(name, None)
            if parameter is None:
                raise ValueError(f"{type(module).__name__} has no free parameter {path!r}")
            if parameter.shape != value.shape:
                raise ValueError(f"{path} has shape {tuple(parameter.shape)}, not {tuple(value.shape)}")
            setattr(owner, name, value)

    def output(self, name: str, value: Tensor) -> None:
        """Record a computed output. Recorded again, it is one more route to it: only compared."""
        if name not in self.tensors:
            raise NotRun(f"the file has no output {name!r}")
        self.outputs.setdefault(name, []).append(value)

    def only(self, given: Mapping[str, Any], known: Iterable[str]) -> None:
        """Refuse options that the runner does not know."""
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise NotRun(f"unknown option {unknown[0]!r} = {given[unknown[0]]!r}")

    def gradient_of(self, name: str) -> str | None:
        """The tensor whose gradient `name` is, or None."""
        for prefix in ("grad.", "d_", "d"):
            target = name.removeprefix(prefix)
            if name.startswith(prefix) and (prefix == "grad." or target in self.tensors):
                return target
        return None

    def cotangent_of(self, name: str) -> str | None:
        """The output whose cotangent `name` is, or None."""
        if name in ("cot", "cotangent"):
            return "out" if "out" in self.tensors else "output"
        if name == "cot.last" and "out.last" not in self.tensors:
            return next(reversed(self.names("out.")), None)
        if name.startswith("cot."):
            target = "out." + name.removeprefix("cot.")
            series = self.names(target.removesuffix("_last") + ".") if target.endswith("_last") else []
            return series[-1] if series else target
        if name.startswith("cotangent."):
            return "streams." + name.removeprefix("cotangent.")
        return None
