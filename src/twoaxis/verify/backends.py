"""Every backend of an operator against the operator's reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twoaxis.ops import choice, local_attention, reference
from twoaxis.ops.native.build import REFUSED
from twoaxis.verify.operators import Operator, operators
from twoaxis.verify.steps import steps
from twoaxis.verify.updates import update_error

TYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
BOUNDS = {
    "float64": 1e-12,
    "float32": 1e-5,
}  # of what is rounded inside; results in bfloat16 are rounded once more


@dataclass(frozen=True)
class BackendRow:
    """One backend of one operator in one dtype: its largest error in outputs and gradients, or why it is not here."""

    operator: str
    backend: str
    dtype: str
    error: float | None
    bound: float
    missing: str = ""

    @property
    def passed(self) -> bool:
        """One that is not here has not failed, unless TWOAXIS_BACKEND asks for it or a compiler refuses its source."""
        if self.error is None:
            return choice.requested() != self.backend and REFUSED not in self.missing
        return self.error <= self.bound


def backends() -> Iterator[BackendRow]:
    """All rows, as they are measured. Sizes are odd, layouts are those of a model, and every gradient is compared."""
    for one in operators():
        yield from of_operator(one)
    yield from _attentions()
    yield from _steps()
    yield from _updates()


def of_operator(one: Operator) -> Iterator[BackendRow]:
    """Rows of an operator that is checked by one call."""
    asked = ("compiled",) if choice.requested() == "compiled" else ()  # compiling takes its time
    for backend in ("plain", "native", *asked):
        for name, dtype in TYPES.items():
            if (backend, name) == ("native", "float64"):
                continue
            inputs = [x.to(dtype) for x in one.inputs()]
            bound = BOUNDS.get(name, 1e-5 + one.roundings[backend != "plain"] * 2.0**-8)
            with choice.requesting(backend):
                missing = choice.missing(one.kernel) if backend == "native" else ""
                error = None if missing else _error(one.fast, one.exact, inputs)
            yield BackendRow(one.name, backend, name, error, bound, missing)


def _attentions() -> Iterator[BackendRow]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 129, 24), (2, 2, 129, 24), (2, 2, 129, 24)]
    exact_inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def errors(backend: str, inputs: list[Tensor]) -> float:
        def error(window: int | None) -> float:
            fast = partial(local_attention, window=window, backend=backend)
            return _error(fast, partial(reference.local_attention, window=window), inputs)

        return max(error(window) for window in (31, None))

    for name, dtype in TYPES.items():
        inputs = [x.to(dtype) for x in exact_inputs]
        torchs = errors("sdpa", inputs)
        bound = BOUNDS.get(name, 1.05 * torchs)  # in bfloat16 no worse than torch's own kernel
        for backend in ("blocked", "sdpa", "native"):
            missing = choice.missing("local_attention") if backend == "native" else ""
            if (backend, name) != ("native", "float64"):
                error = None if missing else errors(backend, inputs)
                yield BackendRow("local_attention", backend, name, error, bound, missing)


def _steps() -> Iterator[BackendRow]:
    with choice.requesting("native"):
        for step in steps():
            missing = choice.missing(step.kernel)
            with _one_thread():
                error = None if missing else step.error(torch.float32)
            yield BackendRow(step.operator, "native", "float32", error, BOUNDS["float32"], missing)


def _updates() -> Iterator[BackendRow]:
    for backend in ("plain", "native"):
        for name, dtype in TYPES.items():
            if (backend, name) != ("native", "float64"):
                with choice.requesting(backend):
                    missing = choice.missing("adamw") if backend == "native" else ""
                    error = None if missing else update_error(dtype)
                yield BackendRow("adamw", backend, name, error, BOUNDS.get(name, BOUNDS["float32"]), missing)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _error(fast: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
    """Largest difference of output and gradients, relative to max(1, largest entry), from those in float64."""
    pairs = zip(_results(fast, inputs), _results(exact, [x.double() for x in inputs]), strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def _results(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = f(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
