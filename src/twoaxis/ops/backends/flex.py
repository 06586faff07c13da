"""Windowed attention by FlexAttention: a mask function, and a block mask that skips what no window reaches.

On a CPU torch 2.13 has no backward for it and refuses inputs that require a gradient. Uncompiled it makes all
scores, so it is compiled on a GPU and, above a million scores, on a CPU (some 10 s at the first call).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..precision import full_precision

_COMPILE_FROM = 1 << 20  # scores of a head


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    segments: Tensor | None,
    sink_tokens: int,
    compiled: bool | None = None,
) -> Tensor:
    """`local_attention` on checked arguments; rows of padded queries are not yet zero."""
    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise InputError("backend='flex' has no gradients on a CPU: use 'blocked' or 'auto'")
        q, k, v = q.detach(), k.detach(), v.detach()
    Tq, Tk = q.shape[2], k.shape[2]
    if 0 in q.shape:
        return torch.zeros_like(q)
    if segments is None:
        mask = _window_mask(Tq, Tk, window, sink_tokens, q.device)
    else:
        mask = _block_mask(_visible(Tk - Tq, window, sink_tokens, segments), q.shape[0], Tq, Tk, q.device)
    if compiled is None:
        compiled = q.device.type != "cpu" or Tq * Tk > _COMPILE_FROM
    compiled = compiled and not torch.compiler.is_compiling()  # it will be, with the rest
    grouped = q.shape[1] != k.shape[1]
    with full_precision(q), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
        out: Tensor = _kernel(compiled)(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        return out


@functools.cache
def _kernel(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if compiled:
        return torch.compile(flex_attention, dynamic=False)
    return flex_attention


@functools.lru_cache(maxsize=64)
def _window_mask(Tq: int, Tk: int, window: int | None, sink_tokens: int, device: torch.device) -> Any:
    """The block mask of a shape, made once."""
    with torch.inference_mode(False):  # training may use it after generation
        return _block_mask(_visible(Tk - Tq, window, sink_tokens, None), None, Tq, Tk, device)


def _block_mask(visible: Callable[..., Tensor], B: int | None, Tq: int, Tk: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(visible, B, None, Tq, Tk, device=device)


def _visible(
    offset: int, window: int | None, sink_tokens: int, segments: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether query i, at position offset + i, reads key s: the mask function of `visible`."""

    def mask(b: Tensor, h: Tensor, i: Tensor, s: Tensor) -> Tensor:
        p = offset + i
        seen = s <= p
        if window is not None:
            near = p - s < window
            seen = seen & (near | (s < sink_tokens) if sink_tokens else near)
        if segments is None:
            return seen
        # a padded query reads itself, so that its row stays finite until it is zeroed
        return (seen & (segments[b, p] == segments[b, s]) & (segments[b, p] >= 0)) | (p == s)

    return mask
