"""What reads over depth by known queries compute, as plain operations: see `ops.known_read`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import choice
from .native import known_read as native
from .native.call import address
from .owed import Owed, Sums
from .precision import compute_dtype, token_chunks

if TYPE_CHECKING:
    from .token_read import Options


@dataclass(eq=False)
class Seen:
    """A source as these reads take it: rows (N, d), contiguous, factor r (N,) and, for kernels, where they are."""

    rows: Tensor
    factor: Tensor
    kind: tuple[torch.Size, torch.dtype]
    at: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor, eps: float) -> Seen:
        """Of a source (..., d)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        factors = factor(rows, eps, compute_dtype(x)).contiguous()
        return cls(rows, factors, (x.shape, x.dtype), (rows.data_ptr(), factors.data_ptr()))


@dataclass(eq=False)
class Later(Owed):
    """What such a read leaves: g (N, d), its query w (d,), dots <w, v_i> (n, N), log-sum-exp and <g, h> (N,). sums,
    row: where the gradient of w belongs. at: where g, w, dots, log-sum-exp and <g, h> are, for kernels."""

    sums: Sums
    row: int
    options: Options
    query: Tensor
    g: Tensor
    dots: Tensor
    lse: Tensor
    mean: Tensor
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.g.is_cpu or not self.g.numel():
            return
        (N, d), n, wide = self.g.shape, len(self.dots), self.dots.dtype
        scalars = ((self.query, (d,)), (self.dots, (n, N)), (self.lse, (N,)), (self.mean, (N,)))
        at = (address(self.g, self.g.dtype, (N, d)), *(address(x, wide, shape) for x, shape in scalars))
        self.at = tuple(x or 0 for x in at)

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[Later, int]]) -> list[Tensor]:
        """See `Owed`; one part for each kind of key norm and scale."""
        library, parts = choice.kernel("known_pull", (x,)), []
        for group in dict.fromkeys((read.options.eps, read.options.scale) for read, _ in left):
            reads = [(read, i) for read, i in left if (read.options.eps, read.options.scale) == group]
            run = gathered if library is None else partial(native.gathered, library)
            total, c = run(x.contiguous(), reads)
            reads[0][0].sums.add([read.row for read, _ in reads], c @ x.to(c.dtype))
            parts.append(total)
        return parts


def read(
    o: Options, w: Tensor, gain: Tensor | None, seen: list[Seen]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output (N, d), dots (n, N), log-sum-exp (N) and rho (N or 0)."""
    sources = [x.rows for x in seen]
    (N, d), normed = sources[0].shape, o.output_eps is not None
    out, dots = torch.empty_like(sources[0]), w.new_empty(len(sources), N)
    lse, rho = w.new_empty(N), w.new_empty(N if normed else 0)
    factors, column = torch.stack([x.factor for x in seen]), w.unsqueeze(1)
    for t in token_chunks(N, d, sources[0]):  # the sums of `depth_read`, in its order: equal to the bit
        dots[:, t] = torch.stack([x[t].to(w.dtype) @ column for x in sources]).squeeze(-1)
        logits = dots[:, t] * factors[:, t] * o.scale
        lse[t] = logits.logsumexp(0)
        h = _mixed(sources, logits.softmax(0), t)
        if o.output_eps is not None:
            rho[t] = (h.square().mean(-1) + o.output_eps).rsqrt()
            h *= rho[t].unsqueeze(-1)
            h = h if gain is None else h * gain.to(w.dtype)
        out[t] = h
    return out, dots, lse, rho


def _mixed(sources: Sequence[Tensor], a: Tensor, t: slice) -> Tensor:
    """sum_i a_i v_i of a chunk of tokens."""
    h = sources[0][t].to(a.dtype) * a[0].unsqueeze(-1)
    for x, weight in zip(sources[1:], a[1:]):
        h.addcmul_(x[t].to(a.dtype), weight.unsqueeze(-1))
    return h


def unscaled(o: Options, rows: Sequence[Tensor], dots: Tensor, lse: Tensor, rho: Tensor) -> Tensor:
    """rho h (N, d), summed again."""
    out = torch.empty_like(rows[0])
    for t in token_chunks(len(out), out.shape[1], out):
        r = torch.stack([factor(x[t], o.eps or 0.0, dots.dtype) for x in rows]) * o.scale
        out[t] = _mixed(rows, (dots[:, t] * r - lse[t]).exp(), t) * rho[t].unsqueeze(-1)
    return out


def factor(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of rows (N, d): (N,)."""
    return (torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square() / x.shape[-1] + eps).rsqrt()


def back(
    eps: float, gain: Tensor, inverse: Tensor, y: Tensor, rho: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of y = gain rho h: g = dL/dh (N, d), <g, h> (N) and the gain's gradient (d)."""
    g, mean, dgain = torch.empty_like(dy), torch.empty_like(rho), torch.zeros_like(gain)
    for t in token_chunks(len(dy), dy.shape[1], dy):
        x, dx, r = y[t] * inverse, dy[t].to(gain.dtype), rho[t].unsqueeze(-1)
        dgain += (dx * x).sum(0)
        dx = dx * gain
        along = (dx * x).sum(-1, keepdim=True)
        g[t] = r * (dx - x * along / dy.shape[1])
        mean[t] = (along * r.square() * eps).squeeze(-1)  # <dx, x> (1 - |x|^2 / d)
    return g, mean, dgain


def gathered(x: Tensor, left: Sequence[tuple[Later, int]]) -> tuple[Tensor, Tensor]:
    """sum_s a_s g_s + c_s w_s - x (r^2 / d) sum_s c_s <w_s, x> of a source x (N, d) in its dtype, and c (S, N)."""
    o, dtype = left[0][0].options, left[0][0].dots.dtype
    out, c = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        left[0][0].dots.new_empty(len(left), len(x)),
    )
    queries = torch.stack([read.query for read, _ in left])
    for t in token_chunks(len(x), x.shape[-1], x):
        v, r = x[t].to(dtype), factor(x[t], o.eps or 0.0, dtype)
        dots = torch.stack([read.dots[i, t] for read, i in left])
        a = (dots * (r * o.scale) - torch.stack([read.lse[t] for read, _ in left])).exp()
        along = torch.stack([(read.g[t].to(dtype) * v).sum(-1) - read.mean[t] for read, _ in left])
        c[:, t] = a * along * (r * o.scale)
        total = v * ((c[:, t] * dots).sum(0) * r.square() / -x.shape[-1]).unsqueeze(-1)
        total.addmm_(c[:, t].mT, queries)
        for (read, _), weight in zip(left, a):
            total.addcmul_(read.g[t].to(dtype), weight.unsqueeze(-1))
        out[t] = total
    return out, c
