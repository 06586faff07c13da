"""What stands between a tensor and a kernel that believes its addresses."""

import ctypes
import os
from collections.abc import Sequence

import torch
from torch import Tensor

_forked = False


def address(x: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """The address of a contiguous CPU tensor of exactly this dtype and shape; None for None.

    Raises TypeError for anything else: a kernel would read or write beside it.
    """
    if x is None:
        return None
    at = x.data_ptr()
    fits = x.dtype == dtype and x.shape == torch.Size(shape) and x.is_contiguous() and x.device.type == "cpu"
    if not fits or at % x.element_size() or (not at and x.numel()):
        raise TypeError(
            f"a kernel needs contiguous memory of {tuple(shape)} {dtype} on the CPU, not {tuple(x.shape)} {x.dtype} "
            f"with strides {x.stride()} on {x.device}{'' if at else ', released'}"
        )
    return at


def table(
    xs: Sequence[Tensor | None], dtype: torch.dtype, shape: Sequence[int]
) -> "ctypes.Array[ctypes.c_void_p]":
    """The addresses of several such tensors."""
    return (ctypes.c_void_p * len(xs))(*(address(x, dtype, shape) for x in xs))


def threads() -> int:
    """How many threads a kernel may use: torch's number, but one in a forked child, where OpenMP would hang."""
    return 1 if _forked else torch.get_num_threads()


def checked(failed: int) -> None:
    """A kernel's own verdict."""
    if failed:
        raise MemoryError("not enough memory for a kernel's buffers")


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
