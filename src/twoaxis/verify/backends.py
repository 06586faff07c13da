"""Every backend of an operator against the operator's reference in float64, and which one is used for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from twoaxis import ops
from twoaxis.errors import InputError
from twoaxis.ops import choice, delta_rewrite, depth_read, local_attention, reference
from twoaxis.ops.local_attention import choose
from twoaxis.ops.native import delta_rewrite as native_rewrite
from twoaxis.ops.native import depth_read as native_read
from twoaxis.ops.native import local_attention as native_attention
from twoaxis.ops.token_read import Options
from twoaxis.verify.operators import operators
from twoaxis.verify.steps import steps

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
        """A backend that is not here has not failed, unless TWOAXIS_BACKEND asks for it."""
        if self.error is None:
            return choice.requested() != self.backend
        return self.error <= self.bound


@dataclass(frozen=True)
class Use:
    """What a kind of call is computed by under the present TWOAXIS_BACKEND."""

    operator: str
    call: str
    backend: str


def backends() -> list[BackendRow]:
    """All rows. Sizes are odd, layouts are those of a model, and every gradient is compared."""
    return [*_reads(), *_rewrites(), *_streams(), *_sums(), *_attentions(), *_steps()]


def attention_by() -> str:
    """What computes attention in bfloat16 where a kernel does: "tiles", or "vectors" and why."""
    library = choice.library("local_attention")
    if library is None:
        return "no kernel"
    reason = native_attention.settle(library)
    return f"vectors: {reason}" if reason else "tiles"


def uses() -> list[Use]:
    """Which backend takes which calls here."""
    return [*_read_uses(), *_rewrite_uses(), *_attention_uses(), *_step_uses()]


def _reads() -> Iterator[BackendRow]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(33,), (33,), (33,), *[(3, 43, 33)] * 7]
    exact_inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def call(
        read: Callable[..., Tensor], query: Tensor, key: Tensor, out: Tensor, *sources: Tensor
    ) -> Tensor:
        return read(query, sources, key_gain=key, output_gain=out, output_eps=1e-6)

    yield from _plain_and_native("depth_read", depth_read, reference.depth_read, exact_inputs, call)


def _rewrites() -> Iterator[BackendRow]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 43, 33, 4), (3, 43, 33), (3, 43, 4), (3, 43)]
    exact_inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def call(rewrite: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return rewrite(*inputs, 1e-5)

    yield from _plain_and_native("delta_rewrite", delta_rewrite, reference.delta_rewrite, exact_inputs, call)


def _streams() -> Iterator[BackendRow]:
    generator = torch.Generator().manual_seed(0)
    X = (3, 43, 4, 33)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "stream_read": [X, (3, 43, 4), (33,)],
        "stream_scores": [X, (33, 6)],
        "stream_write": [X, (3, 43, 4, 4), (3, 43, 4), (3, 43, 33)],
    }
    calls: dict[str, Callable[..., Tensor]] = {
        "stream_read": lambda f, x, w, gain: f(x, w, gain=gain, eps=1e-6),
        "stream_scores": lambda f, x, matrix: f(x, matrix, 1e-6),
        "stream_write": lambda f, *inputs: f(*inputs),
    }
    for name, call in calls.items():
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes[name]]
        yield from _plain_and_native(
            name, getattr(ops, name), getattr(reference, name), inputs, call, "streams"
        )


def _sums() -> Iterator[BackendRow]:
    for one in operators():
        fast, plain = getattr(ops, one.name), getattr(reference, one.name)
        yield from _plain_and_native(one.name, fast, plain, one.inputs, one.call, one.kernel, one.roundings)


def _plain_and_native(
    operator: str,
    fast: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    exact_inputs: Sequence[Tensor],
    call: Callable[..., Tensor],
    kernel: str = "",
    roundings: int = 1,
) -> Iterator[BackendRow]:
    """Rows of an operator; roundings: to bfloat16, in a row, that torch's own operations make."""
    asked = ("compiled",) if choice.requested() == "compiled" else ()  # compiling takes its time
    for backend in ("plain", "native", *asked):
        for name, dtype in TYPES.items():
            if (backend, name) == ("native", "float64"):
                continue
            inputs = [x.to(dtype) for x in exact_inputs]
            bound = BOUNDS.get(name, 1e-5 + (roundings if backend == "plain" else 1) * 2.0**-8)
            with choice.requesting(backend):
                missing = _missing(kernel or operator) if backend == "native" else ""
                error = None if missing else _error(fast, plain, inputs, call)
            yield BackendRow(operator, backend, name, error, bound, missing)


def _attentions() -> Iterator[BackendRow]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 129, 24), (2, 2, 129, 24), (2, 2, 129, 24)]
    exact_inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def errors(backend: str, inputs: list[Tensor]) -> float:
        def call(window: int | None) -> Callable[..., Tensor]:
            return lambda f, q, k, v: f(q, k, v, window, backend=backend)

        return max(_error(local_attention, reference.local_attention, inputs, call(w)) for w in (31, None))

    for name, dtype in TYPES.items():
        inputs = [x.to(dtype) for x in exact_inputs]
        torchs = errors("sdpa", inputs)
        bound = BOUNDS.get(name, 1.05 * torchs)  # in bfloat16 no worse than torch's own kernel
        for backend in ("blocked", "sdpa", "native"):
            missing = _missing("local_attention") if backend == "native" else ""
            if (backend, name) != ("native", "float64"):
                error = None if missing else errors(backend, inputs)
                yield BackendRow("local_attention", backend, name, error, bound, missing)


def _steps() -> Iterator[BackendRow]:
    with choice.requesting("native"):
        for step in steps():
            missing = _missing(step.kernel)
            with _one_thread():
                error = None if missing else step.error(torch.float32)
            yield BackendRow(step.operator, "native", "float32", error, BOUNDS["float32"], missing)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _step_uses() -> Iterator[Use]:
    for step in steps():
        takes = torch.get_num_threads() == 1 or not step.one_thread
        native = takes and choice.step_kernel(step.kernel) is not None
        yield Use(step.operator, "float32, decoding", "native" if native else "plain")


def _read_uses() -> Iterator[Use]:
    for dtype in TYPES.values():
        for heads in (1, 2):
            sources = (torch.zeros(2, 9, 8, dtype=dtype),) * 2
            covered = native_read.covers(Options(1e-6, 1.0, "softmax", heads, None, False), sources)
            found = choice.kernel("depth_read", sources) if covered else None
            what = f"{_short(dtype)}, {heads} head{'s' * (heads > 1)}"
            yield Use("depth_read", what, "plain" if found is None else "native")


def _rewrite_uses() -> Iterator[Use]:
    for dtype in TYPES.values():
        for m in (1, 3, 4):
            state, direction = torch.zeros(2, 9, 8, m, dtype=dtype), torch.zeros(2, 9, 8, dtype=dtype)
            covered = native_rewrite.covers(state, direction, m)
            found = choice.kernel("delta_rewrite", (state,), (direction,)) if covered else None
            yield Use("delta_rewrite", f"{_short(dtype)}, m={m}", "plain" if found is None else "native")


def _attention_uses() -> Iterator[Use]:
    kinds = {"window 64 of 512": (512, 512, 64), "full causal, 512": (512, 512, None)}
    kinds |= {"one query against 512 keys": (1, 512, 64), "48 keys": (48, 48, 16)}
    for dtype in TYPES.values():
        for what, (Tq, Tk, window) in kinds.items():
            q, k = torch.zeros(1, 2, Tq, 64, dtype=dtype), torch.zeros(1, 2, Tk, 64, dtype=dtype)
            yield Use("local_attention", f"{_short(dtype)}, {what}", choose("auto", q, k, k, window))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _error(
    fast: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    call: Callable[..., Tensor],
) -> float:
    """Largest difference of output and gradients, relative to max(1, largest entry), from float64's."""
    found = _results(lambda *x: call(fast, *x), inputs)
    exact = _results(lambda *x: call(plain, *x), [x.double() for x in inputs])
    scaled = [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item()
        for a, b in zip(found, exact, strict=True)
    ]
    return max(scaled)


def _results(f: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = f(*leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def _missing(name: str) -> str:
    """Why a kernel is not here, "" if it is."""
    try:
        choice.library(name, required=True)
    except InputError as reason:
        return str(reason)
    return ""
