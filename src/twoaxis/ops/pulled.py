"""The pull backward of reads over depth: each source's gradient is gathered once, from all reads that saw it.

A read that is differentiated by itself writes a gradient for every one of its sources, which autograd then adds to
those of the other reads: n writes and n additions of a source's size for n sources. Inside the decoder's own loop
(`rebuilt.loop`) a read leaves its part of the work undone. It returns gradients for its query, gains and bias, and
notes what a source needs from it: g, the gradient of the weighted sum, and for every source and token three numbers,

    dv_i = sum_s ( a_si g_s + c_si w_s + k_si v_i ),    k_si = -(r_i^2 / d) c_si <w_s, v_i>,

(a: the weight, c: scale r_i times the gradient of the logit, w: the keyed query, r: the key norm's factor). A node
before the reads of a source runs when all of them have, since autograd counts the edges, and sums them up in one pass:
S gradients read, one written, in a fixed order. Other operators leave other work: each kind is a class of its own
(`owed.Owed`) that knows how to gather its part.

A pass through a part of the network pulls from those reads that it ran; a second one (`retain_graph`) runs the reads
and pulls again. Passes may be inside of one another or run in several threads: each has notes of its own, and what
nobody pulled goes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import choice, known_gates, known_mix, rebuilt
from .first_order import first_order
from .known_read import Known
from .known_sums import Seen
from .native import depth_pull
from .owed import Owed, Sums, notes
from .precision import compute_dtype, full_precision, token_chunks


@dataclass(eq=False)
class Left(Owed):
    """What a read's backward left to its sources: g (N, d), a, c (n, N, H), k (n, N) and w (1 or N, d)."""

    g: Tensor
    weights: Tensor
    steps: Tensor
    backs: Tensor
    query: Tensor

    @classmethod
    def gather(cls, x: Tensor, left: Sequence[tuple[Left, int]]) -> list[Tensor]:
        """See `Owed`."""
        library = None
        if all(read.weights.shape[-1] == 1 and read.g.dtype == torch.float32 for read, _ in left):
            library = choice.kernel("depth_pull", (x,))
        return [gathered(x, left) if library is None else depth_pull.gathered(library, x, left)]


class Source:
    """One source of the loop. What reads left to it, and its number among their sources, is noted by the pass."""

    def take(self) -> list[tuple[Owed, int]]:
        """What the reads of the present pass left, in the order of the forward pass."""
        left: list[tuple[Owed, int]] = notes().pop(self, [])
        return left[::-1]

    def of(self, kind: type[Owed]) -> list[tuple[Owed, int]]:
        """Those of one kind, which it keeps."""
        return [x for x in reversed(notes().get(self, [])) if type(x[0]) is kind]

    def exchange(self, kind: type[Owed], for_: Owed) -> None:
        """Those of one kind are done, and this is what came of it."""
        left = notes()
        left[self] = [*(x for x in left[self] if type(x[0]) is not kind), (for_, 0)]


@dataclass(eq=False)
class Pull:
    """What a read knows of its sources."""

    sources: tuple[Source, ...]

    def leave(self, left: Owed) -> None:
        """Called by the read's backward."""
        here = notes()
        for i, source in enumerate(self.sources):
            here.setdefault(source, []).append((left, i))


@dataclass(eq=False)
class Entry:
    """A source while the loop is open. handle: x as reads take it; seen: as those by known queries do, by epsilon."""

    x: Tensor
    number: int
    source: Source
    handle: Tensor
    seen: dict[float, Seen] = field(default_factory=dict)
    rows: Tensor | None = None
    turned: Tensor | None = None

    def heads(self) -> Tensor:
        """A source (..., D, H) as (H, tokens x D), for mixes of heads."""
        if self.turned is None:
            self.turned = self.x.detach().movedim(-1, 0).flatten(1)
        return self.turned

    def flat(self) -> Tensor:
        """(N, d), contiguous, for mixes by known weights."""
        if self.rows is None:
            self.rows = self.x.detach().reshape(-1, self.x.shape[-1]).contiguous()
        return self.rows

    def ready(self, eps: float) -> Seen:
        """For known queries."""
        if eps not in self.seen:
            self.seen[eps] = Seen.of(self.x.detach(), eps)
        return self.seen[eps]


def pulled(sources: tuple[Tensor, ...]) -> tuple[Pull | None, tuple[Tensor, ...]]:
    """The sources as a read inside the loop takes them; themselves and no Pull outside or if one is not plain."""
    loop = rebuilt.current()
    if loop is None or not all(_entered(loop, x) for x in sources):
        return None, sources
    found = [loop.sources[id(x)] for x in sources]
    return Pull(tuple(e.source for e in found)), tuple(e.handle for e in found)


def known(
    query: Tensor, key_gain: Tensor | None, sources: Sequence[Tensor], eps: float
) -> tuple[tuple[Sums, int], Pull, list[Seen], Tensor] | None:
    """For a read by a query that the loop knows: where its gradient belongs, the sources, the newest one's handle."""
    loop = rebuilt.current()
    usable = loop is not None and loop.queries and not isinstance(sources, Tensor) and sources
    place = None if loop is None or not usable else known_of(loop).place(query, key_gain)
    if loop is None or place is None or not all(id(x) in loop.sources or _entered(loop, x) for x in sources):
        return None
    found = [loop.sources[id(x)] for x in sources]
    seen = [entry.seen.get(eps) or entry.ready(eps) for entry in found]
    if any(x.kind != seen[0].kind for x in seen) or query.shape != seen[0].kind[0][-1:]:
        return None
    newest = max(found, key=lambda entry: entry.number)
    return place, Pull(tuple([entry.source for entry in found])), seen, newest.handle


def mixed_ones(sources: Sequence[Tensor]) -> tuple[Pull, list[Tensor], Tensor] | None:
    """For a mix: the sources, alike, as rows (N, d), and the newest one's handle; None outside of the loop."""
    kind = sources[0].shape, sources[0].dtype
    found = None if any((x.shape, x.dtype) != kind for x in sources) else _entries(sources)
    if found is None:
        return None
    pull, newest = _held(found)
    return pull, [entry.flat() for entry in found], newest


def headed_ones(sources: Sequence[Tensor]) -> tuple[Pull, list[Tensor], Tensor] | None:
    """For a mix of heads: the sources as (H_m, tokens x D), and the newest one's handle; None outside of the loop."""
    found = _entries(sources)
    if found is None:
        return None
    pull, newest = _held(found)
    return pull, [entry.heads() for entry in found], newest


def _entries(sources: Sequence[Tensor]) -> list[Entry] | None:
    """The sources of the loop; None outside of it or if one is not plain."""
    loop = rebuilt.current()
    if loop is None or not all(id(x) in loop.sources or _entered(loop, x) for x in sources):
        return None
    return [loop.sources[id(x)] for x in sources]


def _held(found: list[Entry]) -> tuple[Pull, Tensor]:
    """What an operator knows of its sources, and the newest one's handle, which stands for all."""
    newest = max(found, key=lambda entry: entry.number)
    return Pull(tuple([entry.source for entry in found])), newest.handle


def _entered(loop: rebuilt.Loop, x: Tensor) -> bool:
    """Whether a source is one of the loop, as it is from now on if it is plain."""
    if id(x) in loop.sources:
        return True
    if type(x) is not Tensor or not x.requires_grad:
        return False
    source, number = Source(), len(loop.sources)
    anchors = (
        known.anchor for known in (known_of(loop), known_mix.known_of(loop), known_gates.known_of(loop))
    )
    handle = _Gather.apply(source, loop.newest_source, x, *anchors)
    loop.newest_source, loop.sources[id(x)] = handle, Entry(x, number, source, handle)
    return True


def known_of(loop: rebuilt.Loop) -> Known:
    """The loop's queries."""
    if loop.known is None:
        loop.known = Known(loop.queries)
    found: Known = loop.known
    return found


class _Gather(torch.autograd.Function):
    """The source itself; backward sums what its reads left.

    before: the source before it, so that this one's node runs first, and so all reads that hold on to it or to a later
    one. anchors: of known queries, weights and gates, whose nodes run after it."""

    @staticmethod
    def forward(ctx: Any, source: Source, before: Tensor | None, x: Tensor, *anchors: Tensor) -> Tensor:
        ctx.source, ctx.n = source, len(anchors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (x,), kinds = ctx.saved_tensors, _by_kind(ctx.source.take())
        rows, total = x.reshape(-1, x.shape[-1]), grad
        with full_precision(x):
            for kind, left in kinds.items():
                for part in kind.gather(rows, left):
                    total = part.view(x.shape) if total is None else total + part.view(x.shape)
        return None, None, total, *(None,) * ctx.n


def _by_kind(every: list[tuple[Owed, int]]) -> dict[type[Owed], list[tuple[Owed, int]]]:
    kinds: dict[type[Owed], list[tuple[Owed, int]]] = {}
    for owed, i in every:
        kinds.setdefault(type(owed), []).append((owed, i))
    return kinds


def gathered(x: Tensor, left: Sequence[tuple[Left, int]]) -> Tensor:
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
