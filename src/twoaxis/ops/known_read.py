"""Reads over depth whose queries are known when the loop over all layers opens: their backward reads no source.

Of a softmax read h = sum_i a_i v_i by a query that depends on no token, with keyed query w, s_i = scale r_i <w, v_i>
and g = dL/dh, the gradient of a logit needs only the source itself and what the read put out:

    ds_i = a_i (<g, v_i> - <g, h>),    c_i = scale r_i ds_i

So a read's backward goes from the gradient of its output y = gain rho h, rho = 1 / rms(h), to g and <g, h>, and leaves
both to its sources. Where a source's gradient is gathered (`pulled`) from the reads s that saw it, so are the dots

    dv = sum_s a_s g_s + c_s w_s - v (r^2 / d) sum_s c_s <w_s, v>,    dw_s += sum over tokens of c_s v

One pass over g_s of S reads makes both, S + 2 tensors of a source's size in all, where a read that makes its own
logits' gradients moves its n sources once more. h is y / (gain rho), so no state is kept beside y, which the next
product keeps anyway; where a gain is 0, h is summed again. g is kept in the sources' dtype, as autograd would.

The queries' gradients are complete when every source is: all of them belong to one node behind the sources', to
which `rebuilt.loop` is given the queries. Queries that it does not know take the way of `pulled`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import choice
from .first_order import first_order
from .native import known_read as native
from .native.call import address
from .precision import compute_dtype, full_precision, token_chunks

if TYPE_CHECKING:
    from .token_read import Options

Query = tuple[Tensor, Tensor | None]  # a query (d,) and its key gain
SMALLEST = 1e-18  # of a gain that is divided by


class Known:
    """The queries of a loop. anchor: what a source's node holds on to so that theirs runs after it."""

    def __init__(self, queries: Sequence[Query]) -> None:
        plain = [pair for pair in queries if all(x is None or choice.ordinary(x) for x in pair)]
        self.rows = {_names(*pair): row for row, pair in enumerate(plain)}
        self.total: dict[int, Tensor] = {}  # by the number of the pass: gradients of keyed queries (R, d)
        self.d = {pair[0].shape for pair in plain}
        tensors = (x for pair in plain for x in pair)
        self.anchor = _Queries.apply(self, *tensors) if len(self.d) == 1 else torch.empty(0)

    def row(self, query: Tensor, gain: Tensor | None) -> int | None:
        """Its number, None for a query that nobody announced."""
        return self.rows.get(_names(query, gain)) if self.anchor.requires_grad else None

    def add(self, rows: list[int], d: Tensor) -> None:
        """Add to gradients of keyed queries, (S, d)."""
        now = torch._C._current_graph_task_id()
        if now not in self.total:
            self.total = {now: d.new_zeros(len(self.rows), d.shape[1])}
        self.total[now].index_add_(0, torch.tensor(rows, device=d.device), d)


def _names(query: Tensor, gain: Tensor | None) -> tuple[int, int]:
    return id(query), id(gain)


class _Queries(torch.autograd.Function):
    """Nothing; backward gives every query what the sources gathered for it."""

    @staticmethod
    def forward(ctx: Any, known: Known, *tensors: Tensor | None) -> Tensor:
        ctx.known = known
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, now = ctx.saved_tensors, torch._C._current_graph_task_id()
        total, ctx.known.total = ctx.known.total.get(now), {}
        if total is None:
            return (None,) * (1 + len(tensors))
        grads: list[Tensor | None] = []
        for query, gain, d in zip(tensors[::2], tensors[1::2], total):
            grads.append((d if gain is None else d * gain).to(query.dtype))
            grads.append(None if gain is None else (d * query).to(gain.dtype))
        return None, *grads


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
class Later:
    """What such a read leaves: g (N, d), its query w (d,), dots <w, v_i> (n, N), log-sum-exp and <g, h> (N,). at:
    where g, w, dots, log-sum-exp and <g, h> are, for kernels."""

    options: Options
    row: int
    query: Tensor
    g: Tensor
    dots: Tensor
    lse: Tensor
    mean: Tensor
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        (N, d), n, dtype = self.g.shape, len(self.dots), self.dots.dtype
        parts = ((self.query, (d,)), (self.dots, (n, N)), (self.lse, (N,)), (self.mean, (N,)))
        if self.g.is_cpu and self.g.numel():
            self.at = tuple(address(x, t, s) or 0 for x, t, s in ((self.g, self.g.dtype, (N, d)), *((x, dtype, s) for x, s in parts)))


def known_read(
    o: Options, query: Tensor, key_gain: Tensor | None, output_gain: Tensor | None, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor] | None:
    """The read as `depth_read` gives it, and no weights (0,); None if it is not one of these."""
    from .pulled import known

    if o.eps is None or o.eps < 0 or o.heads != 1 or o.normalize != "softmax" or o.return_weights:
        return None
    found = known(query, key_gain, sources, o.eps)
    if found is None or (output_gain is not None and output_gain.shape != query.shape):
        return None
    row, pull, seen, newest = found
    library = choice.kernel("known_read", (newest,), (query, key_gain, output_gain)) if newest.numel() else None
    out: Tensor = _KnownRead.apply(library, o, pull, row, (query, key_gain), seen, output_gain, newest)
    return out, query


class _KnownRead(torch.autograd.Function):
    """Kept are the output, the sources' dots, and two numbers per token. newest: of the sources' handles."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        library, o, pull, row, query, seen, gain, newest = args
        with full_precision(newest):
            w = _keyed(query, seen[0].factor.dtype)
            run = _read if library is None else native.read
            out, dots, lse, rho = run(library, o, w, gain, seen)
        out = out.view(newest.shape)
        again = gain is not None and bool((gain.abs() < SMALLEST).any())  # h cannot be had from the output
        ctx.o, ctx.pull, ctx.row, ctx.library = o, pull, row, library
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*query, gain, out, dots, lse, rho, *([x.rows for x in seen] if again else ()))
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key_gain, gain, out, dots, lse, rho, *rows = ctx.saved_tensors
        o, dgain = ctx.o, None
        if dout is not None:
            with full_precision(out):
                w = _keyed((query, key_gain), dots.dtype)
                dy = dout.reshape(-1, out.shape[-1]).to(out.dtype).contiguous()
                y = out.reshape(dy.shape)
                if o.output_eps is None:
                    g, mean = dy, (dy.to(dots.dtype) * y).sum(-1)
                else:
                    ones = torch.ones(y.shape[1], dtype=dots.dtype, device=y.device)
                    known, inverse = ones if gain is None else gain.to(dots.dtype), ones
                    if rows:
                        y = _unscaled(o, rows, dots, lse, rho)
                    elif gain is not None:
                        inverse = 1 / known
                    run = _back if ctx.library is None else native.back
                    g, mean, dgain = run(ctx.library, o.output_eps, known.contiguous(), inverse, y, rho, dy)
            ctx.pull.leave(Later(o, ctx.row, w, g, dots, lse, mean))
        dgain = None if dgain is None or gain is None else dgain.to(gain.dtype)
        return None, None, None, None, None, None, dgain, None


def _keyed(query: Query, dtype: torch.dtype) -> Tensor:
    w = query[0].to(dtype)
    return w.contiguous() if query[1] is None else w * query[1].to(dtype)


def _read(
    _: ctypes.CDLL | None, o: Options, w: Tensor, gain: Tensor | None, seen: list[Seen]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output (N, d), dots (n, N), log-sum-exp (N) and rho (N or 0)."""
    sources = [x.rows for x in seen]
    (N, d), like = sources[0].shape, {"dtype": w.dtype, "device": w.device}
    out, dots = torch.empty_like(sources[0]), torch.empty(len(sources), N, **like)
    lse, rho = torch.empty(N, **like), torch.empty(N if o.output_eps is not None else 0, **like)
    factors = torch.stack([x.factor for x in seen]) * o.scale
    for t in token_chunks(N, d, sources[0]):
        dots[:, t] = torch.stack([x[t].to(w.dtype) @ w for x in sources])
        logits = dots[:, t] * factors[:, t]
        lse[t] = logits.logsumexp(0)
        h = _mixed(sources, (logits - lse[t]).exp(), t)
        if o.output_eps is not None:
            rho[t] = (h.square().mean(-1) + o.output_eps).rsqrt()
            h *= rho[t].unsqueeze(-1) if gain is None else rho[t].unsqueeze(-1) * gain.to(w.dtype)
        out[t] = h
    return out, dots, lse, rho


def _mixed(sources: Sequence[Tensor], a: Tensor, t: slice) -> Tensor:
    """sum_i a_i v_i of a chunk of tokens."""
    h = sources[0][t].to(a.dtype) * a[0].unsqueeze(-1)
    for x, weight in zip(sources[1:], a[1:]):
        h.addcmul_(x[t].to(a.dtype), weight.unsqueeze(-1))
    return h


def _unscaled(o: Options, rows: Sequence[Tensor], dots: Tensor, lse: Tensor, rho: Tensor) -> Tensor:
    """rho h (N, d), summed again."""
    out = torch.empty_like(rows[0])
    for t in token_chunks(*out.shape, out):
        r = torch.stack([factor(x[t], o.eps or 0.0, dots.dtype) for x in rows]) * o.scale
        out[t] = _mixed(rows, (dots[:, t] * r - lse[t]).exp(), t) * rho[t].unsqueeze(-1)
    return out


def factor(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of rows (N, d): (N,)."""
    return (torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square() / x.shape[-1] + eps).rsqrt()


def _back(
    _: ctypes.CDLL | None, eps: float, gain: Tensor, inverse: Tensor, y: Tensor, rho: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of y = gain rho h: g = dL/dh (N, d), <g, h> (N) and the gain's gradient (d)."""
    g, mean, dgain = torch.empty_like(dy), torch.empty_like(rho), torch.zeros_like(gain)
    for t in token_chunks(*dy.shape, dy):
        x, dx, r = y[t] * inverse, dy[t].to(gain.dtype), rho[t].unsqueeze(-1)
        dgain += (dx * x).sum(0)
        dx = dx * gain
        along = (dx * x).sum(-1, keepdim=True)
        g[t] = r * (dx - x * along / dy.shape[1])
        mean[t] = (along * r.square() * eps).squeeze(-1)  # <dx, x> (1 - |x|^2 / d)
    return g, mean, dgain


def gather(known: Known, x: Tensor, every: list[tuple[Any, int]]) -> list[Tensor]:
    """Parts of the gradient of one source x (N, d); adds to those of the queries."""
    left = [(read, i) for read, i in every if isinstance(read, Later)]
    library, sums = choice.kernel("known_read", (x,)) if left else None, []
    for group in dict.fromkeys((read.options.eps, read.options.scale) for read, _ in left):
        reads = [(read, i) for read, i in left if (read.options.eps, read.options.scale) == group]
        total, c = gathered(x, reads) if library is None else native.gathered(library, x.contiguous(), reads)
        known.add([read.row for read, _ in reads], c @ x.to(c.dtype))
        sums.append(total)
    return sums


def gathered(x: Tensor, left: list[tuple[Later, int]]) -> tuple[Tensor, Tensor]:
    """sum_s a_s g_s + c_s w_s - x (r^2 / d) sum_s c_s <w_s, x> of a source x (N, d) in its dtype, and c (S, N)."""
    o, dtype = left[0][0].options, left[0][0].dots.dtype
    out, c = torch.empty_like(x, memory_format=torch.contiguous_format), left[0][0].dots.new_empty(len(left), len(x))
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
