"""`rms_norm` and `add_rms_norm` by their kernel: kept are the normed rows and 1/rms of each."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import choice
from .call import address, checked, threads

_FLOAT, _HALF = torch.float32, torch.bfloat16
FEW = 1 << 14  # numbers up to which a call without gradients costs more than torch's operations


class _Call(ctypes.Structure):
    """`Call` of rms_norm.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "d", "threads")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("x", "branch", "gain", "sum", "out", "scale")),
        *((name, ctypes.c_void_p) for name in ("dout", "dsum", "dx", "dbranch", "dgain")),
    ]


def library(x: Tensor, gain: Tensor, dtype: torch.dtype, branch: Tensor | None = None) -> ctypes.CDLL | None:
    """The kernel for rows (..., d) that give a result of `dtype`, or None."""
    size = x.numel()
    if not size or (size <= FEW and not torch.is_grad_enabled()):
        return None
    if dtype not in (x.dtype, _HALF) or x.shape[-1:] != gain.shape:
        return None
    if branch is None:
        return choice.kernel("rms_norm", (x,), (gain,))
    if branch.dtype not in (x.dtype, _HALF) or branch.shape != x.shape:
        return None
    return choice.kernel("rms_norm", (x,), (gain, branch))


def forward(
    lib: ctypes.CDLL, x: Tensor, gain: Tensor, eps: float, dtype: torch.dtype, branch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x in `dtype`; x + branch, or x itself without one; 1/rms of every row (N,)."""
    call, held = _call(x, gain, eps)
    out, scale = torch.empty(x.shape, dtype=dtype), torch.empty(call.N)
    total, of_branch = x, x.dtype
    if branch is not None:
        total, of_branch, branch = torch.empty(x.shape, dtype=x.dtype), branch.dtype, branch.contiguous()
        call.branch = address(branch, of_branch, x.shape)
        call.sum = total.data_ptr()
    call.out, call.scale = out.data_ptr(), scale.data_ptr()
    checked(lib.norm_forward(ctypes.byref(call), _half(x.dtype, of_branch, dtype)))
    del held
    return out, total, scale


def backward(
    lib: ctypes.CDLL,
    total: Tensor,
    gain: Tensor,
    scale: Tensor,
    grad: Tensor,
    of_total: Tensor | None = None,
    branch: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the gain, and of a branch of this dtype; of_total: the gradient of the sum itself."""
    call, held = _call(total, gain, 0.0)
    branch = total.dtype if branch is None else branch
    grad = grad.contiguous()
    dx = torch.empty(total.shape, dtype=total.dtype)
    dbranch = dx if branch == total.dtype else torch.empty(total.shape, dtype=branch)
    dgain = torch.zeros(call.threads, call.d)
    call.dout, call.dx = address(grad, grad.dtype, total.shape), dx.data_ptr()
    if of_total is not None:
        of_total = of_total.to(total.dtype).contiguous()
        call.dsum = address(of_total, total.dtype, total.shape)
    if dbranch is not dx:
        call.dbranch = dbranch.data_ptr()
    call.scale, call.dgain = address(scale, _FLOAT, (call.N,)), dgain.data_ptr()
    checked(lib.norm_backward(ctypes.byref(call), _half(total.dtype, branch, grad.dtype)))
    del held
    return dx, dgain.sum(0).to(gain.dtype), dbranch


def _call(x: Tensor, gain: Tensor, eps: float) -> tuple[_Call, tuple[Tensor, Tensor]]:
    """The rows and the gain as the kernel takes them, and what keeps them alive."""
    d = x.shape[-1]
    x, gain = x.contiguous(), gain.to(_FLOAT).contiguous()
    N = x.numel() // d
    call = _Call(N=N, d=d, threads=max(1, min(threads(), N // 16)), eps=eps)
    call.x, call.gain = address(x, x.dtype, x.shape), address(gain, _FLOAT, (d,))
    return call, (x, gain)


def _half(x: torch.dtype, branch: torch.dtype, out: torch.dtype) -> int:
    return (x == _HALF) + 2 * (branch == _HALF) + 4 * (out == _HALF)
