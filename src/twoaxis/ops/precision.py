"""The precision rule of every operator: at least float32 inside, one cast at the end."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

BF16_UNITS = torch.backends.mkldnn.is_available() and bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)  # torch multiplies bfloat16 in this CPU's hardware
CHUNK = 1 << 18  # numbers of a temporary on a CPU; smaller ones cost more in dispatch than they save in cache


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Float64 if any tensor is float64, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; nothing is called where it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to products on `x`'s device, None where it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not touch the reductions on `x`'s device."""
    kind = x.device.type
    off = kind == "meta" or not torch.is_autocast_enabled(kind)
    return nullcontext() if off else torch.autocast(kind, enabled=False)


def token_chunks(tokens: int, width: int, x: Tensor) -> Iterator[slice]:
    """Slices of the tokens, such that a temporary of `width` numbers per token stays in a CPU's cache."""
    numbers = CHUNK if x.device.type == "cpu" else 1 << 26
    size = tokens if x.is_meta else numbers // max(width, 1)  # without numbers: as few calls as can be
    step = max(16, size)
    return (slice(start, start + step) for start in range(0, tokens, step))


def few(sources: Sequence[Tensor]) -> bool:
    """Whether sources (..., d) are so small that calls cost more than copies: a step of decoding, no gradients."""
    return not torch.is_grad_enabled() and 0 < len(sources) * sources[0].numel() <= CHUNK
