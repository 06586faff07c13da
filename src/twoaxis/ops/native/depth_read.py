"""`depth_read` by its kernel: one call forward, one backward; kept are the sources, dots and norm factors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..first_order import first_order
from ..pulled import Left, Pull
from .call import address, checked, table, threads

if TYPE_CHECKING:
    from ..token_read import Options

_NORMALIZE = {"softmax": 0, "sigmoid": 1, "none": 2}
_FLOAT = torch.float32


class _Call(ctypes.Structure):
    """`Call` of depth_read.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n", "N", "d", "threads", "normalize")),
        *((name, ctypes.c_int64) for name in ("query_stride", "bias_stride")),
        *((name, ctypes.c_float) for name in ("scale", "eps", "output_eps")),
        *((name, ctypes.c_void_p) for name in ("sources", "query", "bias", "output_gain")),
        *((name, ctypes.c_void_p) for name in ("dots", "norms", "weights", "out")),
        *((name, ctypes.c_void_p) for name in ("dout", "dweights", "dsources", "dquery", "dbias", "dgain")),
        *((name, ctypes.c_void_p) for name in ("left_g", "left_a", "left_c", "left_k")),
    ]


def covers(o: Options, sources: Sequence[Tensor]) -> bool:
    """Whether the kernel has these options."""
    return o.heads == 1 and sources[0].shape[-1] > 0 and min(o.eps or 0, o.output_eps or 0) >= 0


class NativeRead(torch.autograd.Function):
    """The arguments and results of `ops.depth_read._DepthRead`, for one head and sources of one dtype."""

    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, pull: Pull | None, *args: Any
    ) -> tuple[Tensor, Tensor | None]:
        o, query, key_gain, output_gain, bias, *sources = args
        read = _Read(o, query, key_gain, output_gain, bias, sources)
        out = torch.empty(read.shape, dtype=sources[0].dtype)
        dots = torch.empty(read.maps, dtype=_FLOAT)
        norms = torch.empty(read.maps, dtype=_FLOAT) if o.eps is not None else None
        weights = torch.empty(read.maps, dtype=_FLOAT) if o.return_weights else None
        if out.numel():
            read.bind(dots, norms)
            read.call.weights = address(weights, _FLOAT, read.maps)
            read.call.out = address(out, sources[0].dtype, read.shape)
            checked(library.depth_read_forward(ctypes.byref(read.call), read.half))
        ctx.o, ctx.library, ctx.pull = o, library, pull
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key_gain, output_gain, bias, dots, norms, *sources)
        return out.view(sources[0].shape), None if weights is None else weights.T.unsqueeze(-1)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key_gain, output_gain, bias, dots, norms, *sources = ctx.saved_tensors
        read = _Read(ctx.o, query, key_gain, output_gain, bias, sources)
        dtype, wanted = sources[0].dtype, ctx.needs_input_grad[7:]
        left = None if ctx.pull is None else read.left()
        dsources = [
            torch.empty(read.shape, dtype=dtype) if want and left is None else None for want in wanted
        ]
        dkeyed = torch.zeros(read.keyed.shape if query.ndim > 1 else (read.call.threads, read.d))
        dbias = None if bias is None else torch.zeros(read.maps)
        dgain = None if output_gain is None else torch.zeros(read.call.threads, read.d)
        if dots.numel():
            read.bind(dots, norms)
            dout = None if dout is None else dout.reshape(read.shape).contiguous()
            dweights = None if dweights is None else dweights.squeeze(-1).T.contiguous()
            read.call.dout = address(dout, dtype, read.shape)
            read.call.dweights = address(dweights, _FLOAT, read.maps)
            dtable = table(dsources, dtype, read.shape)
            read.call.dsources = ctypes.addressof(dtable)
            read.call.dquery = address(dkeyed, _FLOAT, dkeyed.shape)
            read.call.dbias = address(dbias, _FLOAT, read.maps)
            read.call.dgain = None if dgain is None else address(dgain, _FLOAT, dgain.shape)
            if left is not None:
                read.call.left_g = address(left.g, _FLOAT, read.shape)
                for name, x in (("left_a", left.weights), ("left_c", left.steps), ("left_k", left.backs)):
                    setattr(read.call, name, address(x.view(read.maps[::-1]), _FLOAT, read.maps[::-1]))
            checked(ctx.library.depth_read_backward(ctypes.byref(read.call), read.half))
        if left is not None:
            ctx.pull.leave(left)
        dquery, dkey_gain = read.split_keyed(dkeyed if query.ndim > 1 else dkeyed.sum(0, keepdim=True))
        if dbias is not None and bias.shape[1] == 1:
            dbias = dbias.sum(0, keepdim=True)
        return (
            None, None, None, dquery, dkey_gain,
            None if dgain is None else dgain.sum(0).to(output_gain.dtype),
            None if dbias is None else dbias.T.to(bias.dtype),
            *(None if d is None else d.view(x.shape) for d, x in zip(dsources, sources)),
        )  # fmt: skip


class _Read:
    """The inputs as a kernel takes them, and the struct that points to them; this object keeps them alive."""

    def __init__(
        self,
        o: Options,
        query: Tensor,
        key_gain: Tensor | None,
        output_gain: Tensor | None,
        bias: Tensor | None,
        sources: Sequence[Tensor],
    ) -> None:
        self.query, self.key_gain, self.d = query, key_gain, sources[0].shape[-1]
        self.shape = torch.Size((sources[0].numel() // self.d, self.d))
        self.maps = torch.Size((self.shape[0], len(sources)))  # dots, norms, weights and their gradients
        self.sources = [x.reshape(self.shape).contiguous() for x in sources]
        self.half = int(sources[0].dtype == torch.bfloat16)
        keyed = query.to(_FLOAT).reshape(-1, self.d)
        self.keyed = (keyed if key_gain is None else keyed * key_gain.to(_FLOAT)).contiguous()
        self.bias = None if bias is None else bias.to(_FLOAT).T.contiguous()  # (1 or N, n)
        self.output_gain = None if output_gain is None else output_gain.to(_FLOAT).contiguous()
        self.call = _Call(
            n=len(sources), N=self.shape[0], d=self.d, threads=max(1, min(threads(), self.shape[0] // 16)),
            normalize=_NORMALIZE[o.normalize], query_stride=self.d if query.ndim > 1 else 0,
            bias_stride=0 if bias is None or bias.shape[1] == 1 else len(sources), scale=o.scale,
            eps=-1.0 if o.eps is None else o.eps, output_eps=-1.0 if o.output_eps is None else o.output_eps,
        )  # fmt: skip

    def left(self) -> Left:
        """Room for what a pulled read leaves to its sources."""
        g, (N, n) = torch.empty(self.shape), self.maps
        return Left(g, torch.empty(n, N, 1), torch.empty(n, N, 1), torch.empty(n, N), self.keyed)

    def bind(self, dots: Tensor, norms: Tensor | None) -> None:
        """Point to the inputs and the two maps."""
        call = self.call
        self.table = table(self.sources, self.sources[0].dtype, self.shape)
        call.sources = ctypes.addressof(self.table)
        call.query = address(self.keyed, _FLOAT, (self.shape[0] if self.query.ndim > 1 else 1, self.d))
        call.bias = None if self.bias is None else address(self.bias, _FLOAT, self.bias.shape)
        call.output_gain = address(self.output_gain, _FLOAT, (self.d,))
        call.dots, call.norms = address(dots, _FLOAT, self.maps), address(norms, _FLOAT, self.maps)

    def split_keyed(self, dkeyed: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of query and key gain from that of their product w."""
        query, gain = self.query, self.key_gain
        if gain is None:
            return dkeyed.view(query.shape).to(query.dtype), None
        dgain = (dkeyed * query.reshape(-1, self.d)).sum(0)
        return (dkeyed * gain.to(_FLOAT)).view(query.shape).to(query.dtype), dgain.to(gain.dtype)
