"""The pull backward of reads over depth: each source's gradient is gathered once, from all reads that saw it.

A read that is differentiated by itself writes a gradient for every one of its sources, which autograd then adds to
those of the other reads: n writes and n additions of a source's size for n sources. Inside the decoder's own loop
(`rebuilt.loop`) a read leaves its part of the work undone. It returns gradients for its query, gains and bias, and
notes what a source needs from it: g, the gradient of the weighted sum, and for every source and token three numbers,

    dv_i = sum_s ( a_si g_s + c_si w_s + k_si v_i ),    k_si = -(r_i^2 / d) c_si <w_s, v_i>,

(a: the weight, c: scale r_i times the gradient of the logit, w: the keyed query, r: the key norm's factor). A node
before the reads of a source runs when all of them have, since autograd counts the edges, and sums them up in one pass:
S gradients read, one written, in a fixed order.

A pass through a part of the network pulls from those reads that it ran; a second one (`retain_graph`) runs the reads
and pulls again. What a pass noted and nobody pulled is told from the next by autograd's number of the pass, and
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import choice, rebuilt
from .first_order import first_order
from .native import depth_pull
from .precision import compute_dtype, full_precision, token_chunks


@dataclass(eq=False)
class Left:
    """What a read's backward left to its sources: g (N, d), a, c (n, N, H), k (n, N) and w (1 or N, d)."""

    g: Tensor
    weights: Tensor
    steps: Tensor
    backs: Tensor
    query: Tensor


@dataclass(eq=False)
class Source:
    """One source of the loop. left: (the pass, what a read left, its number among that read's sources)."""

    left: list[tuple[int, Left, int]] = field(default_factory=list)

    def take(self) -> list[tuple[Left, int]]:
        """What the reads of the present pass left, in the order of the forward pass."""
        now, left, self.left = torch._C._current_graph_task_id(), self.left, []
        return [(read, i) for number, read, i in reversed(left) if number == now]


@dataclass(eq=False)
class Pull:
    """What a read knows of its sources."""

    sources: tuple[Source, ...]

    def leave(self, left: Left) -> None:
        """Called by the read's backward."""
        now = torch._C._current_graph_task_id()
        for i, source in enumerate(self.sources):
            source.left.append((now, left, i))


def pulled(sources: tuple[Tensor, ...]) -> tuple[Pull | None, tuple[Tensor, ...]]:
    """The sources as a read inside the loop takes them; themselves and no Pull outside or if one is not plain."""
    loop = rebuilt.current()
    if loop is None or not all(type(x) is Tensor and x.requires_grad for x in sources):
        return None, sources
    found = []
    for x in sources:
        if id(x) not in loop.sources:
            source = Source()
            loop.sources[id(x)] = (x, _Gather.apply(source, x), source)
        found.append(loop.sources[id(x)])
    return Pull(tuple(source for _, _, source in found)), tuple(handle for _, handle, _ in found)


class _Gather(torch.autograd.Function):
    """The source itself; backward sums what its reads left."""

    @staticmethod
    def forward(ctx: Any, source: Source, x: Tensor) -> Tensor:
        ctx.source = source
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, Tensor | None]:
        (x,), left = ctx.saved_tensors, ctx.source.take()
        if not left:
            return None, grad
        rows = x.reshape(-1, x.shape[-1])
        with full_precision(x):
            library = None
            if all(read.weights.shape[-1] == 1 and read.g.dtype == torch.float32 for read, _ in left):
                library = choice.kernel("depth_pull", (x,))
            total = gathered(rows, left) if library is None else depth_pull.gathered(library, rows, left)
        total = total.view(x.shape)
        return None, total if grad is None else total + grad


def gathered(x: Tensor, left: list[tuple[Left, int]]) -> Tensor:
    """sum_s a_s g_s + c_s w_s + k_s x of one source x (N, d), in its dtype."""
    dtype, out = compute_dtype(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    static = [(read, i) for read, i in left if len(read.query) == 1 and read.weights.shape[-1] == 1]
    queries = torch.cat([read.query for read, _ in static]) if static else None
    for t in token_chunks(len(x), x.shape[-1], x):
        backs = torch.stack([read.backs[i, t] for read, i in left]).sum(0)
        total = x[t].to(dtype) * backs.unsqueeze(-1)
        if queries is not None:
            total.addmm_(torch.stack([read.steps[i, t, 0] for read, i in static], 1), queries)
        for read, i in left:
            a, c = (n[i, t].unsqueeze(-1) for n in (read.weights, read.steps))  # (c, H, 1)
            heads = (len(total), a.shape[1], -1)
            split = total.view(heads)
            split.addcmul_(read.g[t].view(heads), a)
            if queries is None or len(read.query) != 1 or a.shape[1] > 1:
                w = read.query if len(read.query) == 1 else read.query[t]
                split.addcmul_(w.view(len(w), a.shape[1], -1), c)
        out[t] = total
    return out
