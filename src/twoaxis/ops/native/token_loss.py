"""`token_loss` by its kernel; kept are the logits and two numbers of each row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .. import choice
from .call import address, threads

_FLOAT = torch.float32


class _Call(ctypes.Structure):
    """`Call` of token_loss.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "V", "threads")),
        *((name, ctypes.c_void_p) for name in ("logits", "targets", "scale", "loss", "grad", "out")),
    ]


def library(logits: Tensor, targets: Tensor) -> ctypes.CDLL | None:
    """The kernel for logits (N, V) and targets (N,), or None."""
    if not logits.numel() or targets.dtype != torch.int64 or targets.shape != logits.shape[:1]:
        return None
    return choice.kernel("token_loss", (logits,), (targets,))


def forward(lib: ctypes.CDLL, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, 0 where there is no target, and its largest logit with log sum_v e^(z_v - m)."""
    call, held = _call(logits, targets)
    loss, scale = torch.empty(call.N), torch.empty(call.N, 2)
    call.loss, call.scale = loss.data_ptr(), scale.data_ptr()
    if lib.token_loss(ctypes.byref(call), int(logits.dtype == torch.bfloat16), 0):
        raise IndexError(f"targets must be -100 or from 0 to {call.V - 1}")
    del held
    return loss, scale


def backward(lib: ctypes.CDLL, logits: Tensor, targets: Tensor, scale: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits, from that of the losses' sum."""
    call, held = _call(logits, targets)
    grad, out = grad.to(_FLOAT), torch.empty(logits.shape, dtype=logits.dtype)
    call.scale, call.grad = address(scale, _FLOAT, (call.N, 2)), address(grad, _FLOAT, ())
    call.out = out.data_ptr()
    lib.token_loss(ctypes.byref(call), int(logits.dtype == torch.bfloat16), 1)
    del held
    return out


def _call(logits: Tensor, targets: Tensor) -> tuple[_Call, tuple[Tensor, Tensor]]:
    """Logits and targets as the kernel takes them, and what keeps them alive."""
    logits, targets = logits.contiguous(), targets.contiguous()
    N, V = logits.shape
    call = _Call(N=N, V=V, threads=max(1, min(threads(), N // 4)))
    call.logits, call.targets = address(logits, logits.dtype, (N, V)), address(targets, torch.int64, (N,))
    return call, (logits, targets)
