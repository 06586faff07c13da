"""Windowed attention in blocks of queries against their key spans: O(T w) work, O(T d) kept for backward.

A block of C queries meets the C + w - 1 keys that end at its own last position. Scores are made, used and
dropped slab by slab; backward makes them again, so only the inputs are saved. The g query heads that read one
key head are g C rows against the same keys. Inside, tensors have N = B Hkv rows and at least float32.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..first_order import first_order
from ..precision import compute_dtype, full_precision
from .masks import Masks, make_masks
from .plan import kept_keys

_SLAB = 1 << 17  # scores alive at a time


class Inputs(NamedTuple):
    """The differentiable inputs; in the shapes noted here, also their working form and their gradients."""

    q: Tensor  # (N, Tq g, D), the g heads of a position side by side
    k: Tensor  # (N, kept, D)
    v: Tensor  # (N, kept, D)
    k_sinks: Tensor | None  # (N, blocks, n, D), the sink tokens before each block's span
    v_sinks: Tensor | None  # (N, blocks, n, D)
    sink_logits: Tensor | None  # (Hkv, g)
    position_bias: Tensor | None  # (H, w); its gradient has one more column for pairs without a bias


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    segments: Tensor | None,
    sink_logits: Tensor | None,
    sink_tokens: int,
    position_bias: Tensor | None,
    reach: Tensor | None = None,
) -> Tensor:
    """`local_attention` on checked arguments; rows of padded queries are finite and not yet zero."""
    masks = make_masks(q, k, window, compute_dtype(q), segments, sink_tokens, reach)
    k_sinks, v_sinks = (None if masks.sinks is None else masks.sinks.gather(x) for x in (k, v))
    first = k.shape[2] - kept_keys(q.shape[2], k.shape[2], window)
    k, v = (x[:, :, first:] if first else x for x in (k, v))
    out: Tensor = _Blocked.apply(masks, scale, *Inputs(q, k, v, k_sinks, v_sinks, sink_logits, position_bias))
    return out


class _Slab(NamedTuple):
    """One block of queries for some rows of the batch: R of the N rows, C g query rows, S key columns."""

    masks: Masks
    number: int
    batch: slice

    @property
    def rows(self) -> slice:
        return slice(self.batch.start * self.masks.heads, self.batch.stop * self.masks.heads)

    @property
    def queries(self) -> tuple[slice, slice]:
        block, group = self.masks.plan[self.number], self.masks.group
        return self.rows, slice(block.start * group, block.stop * group)

    def columns(self, x: Tensor, sinks: Tensor | None) -> Tensor:
        """The keys or values that the block meets, sink tokens first: (R, S, D)."""
        block = self.masks.plan[self.number]
        span = x[self.rows, block.first : block.last]
        return span if sinks is None else torch.cat([sinks[self.rows, self.number], span], dim=1)

    def add_columns(self, d: Tensor, dx: Tensor, dsinks: Tensor | None) -> None:
        """Add the gradients (R, S, D) of `columns` to those of what it was taken from."""
        block = self.masks.plan[self.number]
        if dsinks is not None:
            n = dsinks.shape[2]
            dsinks[self.rows, self.number] = d[:, :n]
            d = d[:, n:]
        dx[self.rows, block.first : block.last] += d

    def weights(self, x: Inputs, keys: Tensor, scale: float) -> Tensor:
        """Softmax over the columns: (R, C g, S); sink logits are one more column, the last."""
        added = self.masks.additive(self.number, self.batch, x.position_bias)
        scores = torch.baddbmm(added, x.q[self.queries], keys.mT, alpha=scale)
        if x.sink_logits is not None:
            R, rows, _ = scores.shape
            heads, group = x.sink_logits.shape
            sink = x.sink_logits[None, :, None].expand(R // heads, -1, rows // group, -1)
            scores = torch.cat([scores, sink.reshape(R, rows, 1)], dim=-1)
        return scores.softmax(-1)

    def over_batch(self, x: Tensor) -> Tensor:
        """Sum over the batch: (R, C g, S) -> (Hkv, C, g, S)."""
        return x.unflatten(1, (-1, self.masks.group)).unflatten(0, (-1, self.masks.heads)).sum(0)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, masks: Masks, scale: float, *tensors: Tensor) -> Tensor:
        ctx.masks, ctx.scale = masks, scale
        ctx.save_for_backward(*tensors)
        x = _working(Inputs(*tensors), masks)
        with full_precision(x.q):
            out = torch.empty_like(x.q)
            for slab in _slabs(masks, len(x.k)):
                weights = slab.weights(x, slab.columns(x.k, x.k_sinks), scale)
                values = slab.columns(x.v, x.v_sinks)
                out[slab.queries] = weights[..., : values.shape[1]] @ values
            return _ungroup(out, tensors[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*ctx.saved_tensors)
        x = _working(inputs, ctx.masks)
        with full_precision(x.q):
            do = _group(grad, ctx.masks.heads, x.q.dtype)
            dx = Inputs(*(None if t is None else torch.zeros_like(t) for t in x))  # type: ignore[arg-type]
            if dx.position_bias is not None:
                dx = dx._replace(position_bias=pad(dx.position_bias, (0, 1)))
            for slab in _slabs(ctx.masks, len(x.k)):
                _add_gradients(slab, x, ctx.scale, do[slab.queries], dx)
            if dx.position_bias is not None:
                dx = dx._replace(position_bias=dx.position_bias[:, :-1])
            rest = [
                None if d is None or t is None else d.reshape(t.shape).to(t.dtype)
                for d, t in zip(dx[1:], inputs[1:])
            ]
            return None, None, _ungroup(dx.q, inputs.q), *rest


def _add_gradients(slab: _Slab, x: Inputs, scale: float, do: Tensor, dx: Inputs) -> None:
    """Add what one slab contributes to the gradients; `do` (R, C g, D) is that of its outputs."""
    q, keys, values = x.q[slab.queries], slab.columns(x.k, x.k_sinks), slab.columns(x.v, x.v_sinks)
    S = keys.shape[1]
    weights = slab.weights(x, keys, scale)
    dweights = do @ values.mT
    if x.sink_logits is not None:
        dweights = pad(dweights, (0, 1))  # the sink has no value
    dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
    if dx.sink_logits is not None:
        dx.sink_logits.add_(slab.over_batch(dscores[..., S:]).sum((1, 3)))
        weights, dscores = weights[..., :S], dscores[..., :S]
    dx.q[slab.queries] = (dscores @ keys).mul_(scale)
    slab.add_columns((dscores.mT @ q).mul_(scale), dx.k, dx.k_sinks)
    slab.add_columns(weights.mT @ do, dx.v, dx.v_sinks)
    if dx.position_bias is not None:
        distance = slab.masks.distance(slab.number)
        near = (distance >= 0) & (distance < slab.masks.window)
        column = distance.where(near, slab.masks.window).flatten()
        pairs = slab.over_batch(dscores[..., S - distance.shape[1] :]).transpose(1, 2)  # (Hkv, g, C, S)
        dx.position_bias.index_add_(1, column, pairs.flatten(2).flatten(0, 1))


def _slabs(masks: Masks, N: int) -> Iterator[_Slab]:
    batch = N // masks.heads
    for number, block in enumerate(masks.plan):
        step = max(1, _SLAB // (masks.heads * masks.group * block.scores))
        for start in range(0, batch, step):
            yield _Slab(masks, number, slice(start, min(start + step, batch)))


def _working(x: Inputs, masks: Masks) -> Inputs:
    dtype, logits, bias = masks.dtype, x.sink_logits, x.position_bias
    return Inputs(
        q=_group(x.q, masks.heads, dtype),
        k=x.k.to(dtype).flatten(0, 1),
        v=x.v.to(dtype).flatten(0, 1),
        k_sinks=None if x.k_sinks is None else x.k_sinks.to(dtype).flatten(0, 1),
        v_sinks=None if x.v_sinks is None else x.v_sinks.to(dtype).flatten(0, 1),
        sink_logits=None if logits is None else logits.to(dtype).view(masks.heads, masks.group),
        position_bias=None if bias is None else bias.to(dtype),
    )


def _group(q: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(B, H, Tq, D) -> (B Hkv, Tq g, D)."""
    return q.to(dtype).unflatten(1, (heads, -1)).transpose(2, 3).flatten(2, 3).flatten(0, 1)


def _ungroup(x: Tensor, like: Tensor) -> Tensor:
    """(B Hkv, Tq g, D) -> (B, H, Tq, D) like `like`, in memory (B, Tq, H, D) for the projection after it."""
    B, H, Tq, D = like.shape
    heads = len(x) // max(B, 1) or 1
    out = x.view(B, heads, Tq, H // heads, D).permute(0, 2, 1, 3, 4)
    return out.reshape(B, Tq, H, D).transpose(1, 2).to(like.dtype)
