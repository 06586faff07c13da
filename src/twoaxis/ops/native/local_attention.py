"""`local_attention` by its kernel: kept for backward are q, k, v, the output and one number per query."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..backends.plan import kept_keys
from ..first_order import first_order
from . import tiles
from .call import address, checked, threads

_FLOAT = torch.float32
WIDEST = 256  # the kernel's own limit of D


class _View(ctypes.Structure):
    _fields_ = [
        ("at", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("token", ctypes.c_int64),
    ]  # fmt: skip


class _Call(ctypes.Structure):
    """`Call` of local_attention.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "H", "Hkv", "Tq", "Tk", "D", "window", "threads")),
        ("scale", ctypes.c_float),
        *((name, _View) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("segments", "sink_logits", "lse", "dsinks")),
    ]


def covers(q: Tensor, sink_tokens: int, position_bias: Tensor | None, reach: Tensor | None) -> bool:
    """Whether the kernel has these options."""
    return sink_tokens == 0 and position_bias is None and reach is None and 0 < q.shape[-1] <= WIDEST


def pays(q: Tensor, k: Tensor, window: int | None) -> bool:
    """Whether it is faster than what torch offers: not for a step of decoding, nor for few keys."""
    Tq, Tk = q.shape[2], k.shape[2]
    return Tq > 8 and kept_keys(Tq, Tk, window) > 64


def bested(library: ctypes.CDLL, q: Tensor, k: Tensor, window: int | None) -> bool:
    """Whether torch uses matrix units and the kernel does not: full attention in bfloat16 is then torch's."""
    full = window is None or window >= k.shape[2]
    if not full or q.dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return False
    return tiles.chosen(library, _small) is library


def attend(
    library: ctypes.CDLL,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    segments: Tensor | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """`local_attention` on checked arguments; rows of padded queries are zero."""
    if q.dtype == torch.bfloat16:
        library = tiles.chosen(library, _small)
    out: Tensor = _Attention.apply(library, window, scale, segments, sink_logits, q, k, v)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, *args: Any) -> Tensor:
        out, lse = _forward(library, *args)
        ctx.library, ctx.window, ctx.scale = library, *args[:2]
        ctx.save_for_backward(*args[2:], out, lse)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        dsinks, *grads = _backward(ctx.library, ctx.window, ctx.scale, *saved, dout)
        dsink = None if dsinks is None else dsinks.sum(0).to(saved[1].dtype)
        return None, None, None, None, dsink, *grads


def _forward(library: ctypes.CDLL, *args: Any) -> tuple[Tensor, Tensor]:
    """args: window, scale, segments, sink_logits, q, k, v. The output and the log-sum-exp of each query's scores."""
    B, H, Tq, D = (q := args[4]).shape
    out = torch.empty(B, Tq, H, D, dtype=q.dtype).transpose(1, 2)  # as the projection after it wants it
    lse = torch.empty(B, H, Tq, dtype=_FLOAT)
    if out.numel():
        call = _Arguments(*[*args, out, lse])
        checked(library.local_attention_forward(ctypes.byref(call.struct), call.half))
    return out, lse


def _backward(library: ctypes.CDLL, *args: Any) -> tuple[Tensor | None, ...]:
    """args: as of `_forward`, its results, and the output's gradient. Gradients of sink_logits (B, H), q, k, v."""
    sink_logits, q, k, v, *_, dout = args[3:]
    grads = [torch.empty(_transposed(x), dtype=x.dtype).transpose(1, 2) for x in (q, k, v)]
    dsinks = None if sink_logits is None else torch.zeros(q.shape[:2], dtype=_FLOAT)
    if not dout.numel():
        return dsinks, *map(torch.zeros_like, grads)
    call = _Arguments(*args[:-1])
    call.differentiate(dout, grads, dsinks)
    checked(library.local_attention_backward(ctypes.byref(call.struct), call.half))
    return dsinks, *grads


def settle(library: ctypes.CDLL) -> str:
    """Why no matrix tiles are used; "" if they are."""
    found = tiles.settle(library, _small)
    return found if isinstance(found, str) else ""


@torch.no_grad()
def _small(library: ctypes.CDLL) -> list[Tensor]:
    """Results of a small call, for every kind of number that a kernel gives."""
    *qkv, dout = tiles.sample()
    args = (33, 0.1, None, torch.tensor([0.5, -0.5]), *qkv)
    out, lse = _forward(library, *args)
    found = [out, lse, *_backward(library, *args, out, lse, dout)]
    return [x for x in found if x is not None]


def _small_ids(segments: Tensor) -> Tensor:
    """The same documents by ids of 32 bits."""
    ids = segments.to(torch.int32)
    if segments.dtype == torch.int64 and not ids.equal(segments):
        ids = segments.unique(return_inverse=True)[1].to(torch.int32)
        ids[segments < 0] = -1
    return ids


def _transposed(x: Tensor) -> tuple[int, int, int, int]:
    B, H, T, D = x.shape
    return B, T, H, D


class _Arguments:
    """The struct that a kernel reads, and the tensors that it points into, kept alive."""

    def __init__(
        self,
        window: int | None,
        scale: float,
        segments: Tensor | None,
        sink_logits: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        (B, H, Tq, D), (_, Hkv, Tk, _) = q.shape, k.shape
        self.half, self.dtype = int(q.dtype == torch.bfloat16), q.dtype
        self.alive: list[Tensor] = []
        self.struct = _Call(
            B=B, H=H, Hkv=Hkv, Tq=Tq, Tk=Tk, D=D, window=Tk if window is None else min(window, Tk),
            threads=max(1, min(threads(), B * Hkv)), scale=scale, lse=address(lse, _FLOAT, (B, H, Tq)),
        )  # fmt: skip
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
            setattr(self.struct, name, self.view(x, tuple(x.shape)))
        if segments is not None:
            ids = self.hold(_small_ids(segments).contiguous())
            self.struct.segments = address(ids, torch.int32, (B, Tk))
        if sink_logits is not None:
            self.struct.sink_logits = address(self.hold(sink_logits.to(_FLOAT).contiguous()), _FLOAT, (H,))

    def differentiate(self, dout: Tensor, grads: list[Tensor], dsinks: Tensor | None) -> None:
        """Point to the gradient of the output and to those that are to be filled."""
        shapes = [(self.struct.B, h, t, self.struct.D) for h, t in self._sizes()]
        self.struct.dout = self.view(dout, shapes[0])
        for name, grad, shape in zip(("dq", "dk", "dv"), grads, shapes):
            setattr(self.struct, name, self.view(grad, shape))
        self.struct.dsinks = address(dsinks, _FLOAT, (self.struct.B, self.struct.H))

    def _sizes(self) -> list[tuple[int, int]]:
        queries, keys = (self.struct.H, self.struct.Tq), (self.struct.Hkv, self.struct.Tk)
        return [queries, keys, keys]

    def hold(self, x: Tensor) -> Tensor:
        self.alive.append(x)
        return x

    def view(self, x: Tensor, shape: tuple[int, ...]) -> _View:
        """Addresses of a tensor whose last dimension is dense, else of a copy (an output always is)."""
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        at = x.data_ptr()
        if (
            x.shape != torch.Size(shape)
            or x.dtype != self.dtype
            or not x.is_cpu
            or at % x.element_size()
            or not at
        ):
            raise TypeError(
                f"a kernel needs memory of {shape} {self.dtype} on the CPU, not {tuple(x.shape)} {x.dtype}"
            )
        self.hold(x)
        return _View(at, *x.stride()[:3])
