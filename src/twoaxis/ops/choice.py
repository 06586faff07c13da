"""Which way an operator is computed: the one place that reads TWOAXIS_BACKEND.

    plain      PyTorch's own operations; always works
    compiled   in training, each depth operator's equation (`ops.reference`) by torch.compile, once for every shape and
               number of sources, some 10 s each; all else, attention too, is plain. Opt-in: never part of auto
    native     C++ kernels, compiled on first use, for CPU tensors of float32 or bfloat16
    auto       native where it covers a call and can be built, else plain (the default)

A call that a kernel does not cover is computed plainly under every name. Kernels that were asked for and cannot be
built are an error; under auto they are one logged line.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..errors import InputError

BACKENDS = ("auto", "native", "compiled", "plain")
log = logging.getLogger(__name__)
_found: dict[str, "ctypes.CDLL | str"] = {}  # a kernel's library, or why there is none
_noted: set[str] = set()
_equations: dict[str, Callable[..., Any]] = {}  # under torch.compile
_pass = threading.local()
_KINDS = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def requested() -> str:
    """The value of TWOAXIS_BACKEND, "auto" if it is not set. Raises InputError for an unknown one."""
    name = os.environ.get("TWOAXIS_BACKEND") or "auto"
    if name not in BACKENDS:
        raise InputError(f"TWOAXIS_BACKEND={name!r}: give one of {', '.join(BACKENDS)}")
    return name


@contextmanager
def requesting(name: str) -> Iterator[None]:
    """TWOAXIS_BACKEND for a while, for checks and measurements."""
    before = os.environ.get("TWOAXIS_BACKEND")
    os.environ["TWOAXIS_BACKEND"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["TWOAXIS_BACKEND"]
        else:
            os.environ["TWOAXIS_BACKEND"] = before


def kernel(
    name: str, data: Sequence[Tensor], others: Sequence[Tensor | None] = (), required: bool = False
) -> ctypes.CDLL | None:
    """The library that computes this call, or None: compute it plainly.

    All must be plain CPU tensors, and `data` of one dtype, float32 or bfloat16. Tracers and observers of torch's
    operations (torch.compile, functorch, forward-mode derivatives, FLOP counters) would see none in a kernel, so they
    get the plain path.
    `required`: whatever TWOAXIS_BACKEND says, the kernel or an error.
    """
    if required and not torch.compiler.is_compiling():
        return _demanded(name, data, others)
    if torch.compiler.is_compiling() or data[0].dtype not in (torch.float32, torch.bfloat16):
        return None
    if any(x.dtype != data[0].dtype for x in data) or not all(map(ordinary, (*data, *others))) or _observed():
        return None
    choice = requested()
    return None if choice in ("plain", "compiled") else library(name, required=choice == "native")


def forward_mode() -> bool:
    """Whether derivatives go forward with the numbers (`torch.func.jvp`, `torch.autograd.forward_ad`)."""
    return not is_compiling() and forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether one of torch.func's transforms is at work, or forward mode."""
    return not is_compiling() and (_are_functorch_transforms_active() or forward_ad._current_level >= 0)


def equation(name: str) -> Callable[..., Any] | None:
    """An operator's equation in torch's own operations where it has to be differentiated by transforms, else None.

    Fast operators know one derivative, by autograd: `torch.func` and forward mode ask for others.
    """
    if is_compiling() or not (_are_functorch_transforms_active() or forward_ad._current_level >= 0):
        return None  # without another call: this is asked in every call of an operator
    from . import reference

    found: Callable[..., Any] = getattr(reference, name)
    return found


def compiled(name: str, *tensors: Tensor | None) -> Callable[..., Any] | None:
    """The equation of an operator under torch.compile, if TWOAXIS_BACKEND asks for it and a step is trained; as it is
    under transforms (`equation`)."""
    if (plain := equation(name)) is not None:
        return plain
    if is_compiling() or requested() != "compiled" or not is_grad_enabled() or _observed():
        return None
    if not all(map(ordinary, tensors)) or any(x is not None and not x.numel() for x in tensors):
        return None
    return partial(_compiled, name)


def _compiled(name: str, *args: Any, **options: Any) -> Any:
    from . import reference

    if name not in _equations:
        _equations[name] = torch.compile(getattr(reference, name), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=256):  # one for every number of sources
        return _equations[name](*args, **options)


def step_kernel(name: str) -> ctypes.CDLL | None:
    """The library that computes a step without gradients, if its tensors are float32 on the CPU; else None.

    As in `kernel`, whoever observes torch's operations gets the plain path, and so do autocast and gradients.
    """
    if is_compiling():
        return None
    choice = getattr(_pass, "choice", None) or _step_choice()
    if choice == "plain":
        return None
    found = _found.get(name)
    return library(name, required=choice == "native") if found is None or isinstance(found, str) else found


@contextmanager
def settled() -> Iterator[None]:
    """What `step_kernel` goes by is looked at once, for all calls of a pass; a pass is one thread's."""
    before = getattr(_pass, "choice", None)
    _pass.choice = _step_choice()
    try:
        yield
    finally:
        _pass.choice = before


def _step_choice() -> str:
    if is_grad_enabled() or is_autocast_enabled("cpu") or _observed():
        return "plain"
    choice = requested()
    return "plain" if choice == "compiled" else choice


def library(name: str, required: bool = False) -> ctypes.CDLL | None:
    """A kernel's library, built at the first call; None, after one logged line, or InputError where it cannot be."""
    found = _library_or_reason(name)
    if not isinstance(found, str):
        return found
    if required:
        raise InputError(f"the native backend was asked for: {found}, or ask for 'auto' or 'plain'")
    if found not in _noted:
        _noted.add(found)
        log.warning("operators run as plain PyTorch: %s", found)
    return None


def missing(name: str) -> str:
    """Why a kernel is not here, "" if it is."""
    found = _library_or_reason(name)
    return found if isinstance(found, str) else ""


def _library_or_reason(name: str) -> "ctypes.CDLL | str":
    from .native.build import UnavailableError
    from .native.build import library as built

    if name not in _found:
        try:
            _found[name] = built(name)
        except UnavailableError as reason:
            _found[name] = str(reason)
    return _found[name]


def _demanded(name: str, data: Sequence[Tensor], others: Sequence[Tensor | None]) -> ctypes.CDLL | None:
    if not _fits(data, others):
        x = data[0]
        raise InputError(
            f"backend='native' runs plain CPU tensors of float32 or bfloat16, not {x.dtype} on {x.device}: use 'auto'"
        )
    return None if _observed() else library(name, required=True)


def _fits(data: Sequence[Tensor], others: Sequence[Tensor | None]) -> bool:
    dtype = data[0].dtype
    return (
        dtype in (torch.float32, torch.bfloat16)
        and all(x.dtype == dtype for x in data)
        and all(map(ordinary, (*data, *others)))
    )


def ordinary(x: Tensor | None) -> bool:
    """Whether a tensor's memory may be read behind torch's back."""
    return x is None or (type(x) in _KINDS and x.is_cpu and x.layout == _STRIDED)


def _observed() -> bool:
    return bool(
        _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state()
        or forward_ad._current_level >= 0
    )
