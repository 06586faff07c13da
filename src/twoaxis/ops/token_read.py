"""The arithmetic of a depth read on one chunk of tokens, forward and backward (see `depth_read`).

Per token, with k_i = r_i v_i, r_i = 1 / sqrt(mean(v_i^2) + eps), w = key_gain * query and logits
s_i = scale r_i <w, v_i> + b_i, the gradient of a source is

    dv_i = a_i g + c_i w - v_i (r_i^2 / d) c_i <w, v_i>,    c_i = scale r_i ds_i,

with g the gradient of the read and ds_i = a_i (<g, v_i> - sum_j a_j <g, v_j>) for softmax.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import Normalize
from .precision import compute_dtype, token_chunks
from .pulled import Left


class Options(NamedTuple):
    """The options of `depth_read` that are not tensors."""

    eps: float | None
    scale: float
    normalize: Normalize
    heads: int
    output_eps: float | None
    return_weights: bool


class TokenRead:
    """N tokens in the compute dtype: n sources (N, d), H heads of width d / H; c tokens in a chunk t."""

    def __init__(
        self,
        o: Options,
        query: Tensor,
        key_gain: Tensor | None,
        output_gain: Tensor | None,
        bias: Tensor | None,
        sources: Sequence[Tensor],
    ) -> None:
        self.o, self.bias, self.dtype = o, bias, compute_dtype(*sources)
        self.d = sources[0].shape[-1]
        self.sources = self.flat(sources)
        self.static = query.ndim == 1
        query = query.to(self.dtype).reshape(-1, self.d)
        self.keyed = query if key_gain is None else query * key_gain.to(self.dtype)  # w: (1 or N, d)
        self.output_gain = None if output_gain is None else output_gain.to(self.dtype)

    def flat(self, sources: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sources as (N, d)."""
        return [x.reshape(-1, self.d) for x in sources]

    @property
    def chunks(self) -> list[slice]:
        """Slices of the tokens."""
        x = self.sources[0]
        return list(token_chunks(len(x), self.d, x))

    def empty(self, dtype: torch.dtype) -> Tensor:
        """An (N, d) tensor to be filled."""
        x = self.sources[0]
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    def take(self, t: slice) -> list[Tensor]:
        """The sources of a chunk; each is turned into the compute dtype where it is used, one at a time."""
        return [x[t] for x in self.sources]

    def rows(self, x: Tensor, t: slice) -> Tensor:
        """The tokens of a chunk from (n, N, ...) or, if they are all the same, (n, 1, ...)."""
        return x if x.shape[1] == 1 else x[:, t]

    def query(self, t: slice) -> Tensor:
        return self.keyed if self.static else self.keyed[t]

    def split(self, x: Tensor) -> Tensor:
        """(c, d) -> (c, H, d / H); one head stays (c, d)."""
        return x if self.o.heads == 1 else x.unflatten(-1, (self.o.heads, -1))

    def per_source(self, x: Tensor) -> tuple[Tensor, ...]:
        """(n, c, H) -> n tensors that scale a split source."""
        return (x if self.o.heads == 1 else x[..., None]).unbind(0)

    def dot(self, x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        """<x, w> per head: (c, d) and (1 or c, d) -> (c, H), in `out` if that is given."""
        if self.o.heads == 1 and len(w) == 1:
            return torch.mm(x, w.mT, out=out)
        return torch.sum((x * w).view(len(x), self.o.heads, -1), -1, out=out)

    def score(self, xs: list[Tensor], t: slice, dots: Tensor, norms: Tensor) -> None:
        """Fill in <w, v_i>, (n, N, H), and r_i, (n, N, 1): both while the source is in the cache."""
        w = self.query(t)
        lengths = norms[:, t] if self.o.eps is not None else norms.expand(len(xs), -1, -1)
        for x, dot, length in zip(xs, dots[:, t].unbind(0), lengths.unbind(0)):
            x = x.to(self.dtype)
            self.dot(x, w, dot)
            if self.o.eps is not None:
                torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=length)
        if self.o.eps is not None:
            lengths.square_().div_(self.d).add_(self.o.eps).rsqrt_()

    def weights(self, dots: Tensor, factors: Tensor, t: slice) -> Tensor:
        """Normalised over the sources, dimension 0: (n, c, H)."""
        logits = dots * factors * self.o.scale
        hidden: Tensor | None = None
        if self.bias is not None:
            bias = self.rows(self.bias, t).to(self.dtype)[..., None]
            logits, hidden = logits + bias, bias == -torch.inf
        if self.o.normalize == "softmax":
            a = logits.softmax(0)
            return a if hidden is None else a.masked_fill(hidden.all(0), 0.0)  # nothing to read: NaN -> 0
        if self.o.normalize == "sigmoid":
            return logits.sigmoid()
        return logits if hidden is None else logits.masked_fill(hidden, 0.0)

    def mix(self, xs: list[Tensor], a: Tensor, total: Tensor | None = None) -> Tensor:
        """sum_i a_i v_i: (c, d), in `total` if that is given."""
        if total is None:
            total = torch.empty(xs[0].shape, dtype=self.dtype, device=xs[0].device)
        first, *rest = self.per_source(a)
        split = self.split(total)
        torch.mul(self.split(xs[0].to(self.dtype)), first, out=split)
        for x, weight in zip(xs[1:], rest):
            split.addcmul_(self.split(x.to(self.dtype)), weight)
        return total

    def normed(self, h: Tensor) -> Tensor:
        """The output norm, if there is one."""
        if self.o.output_eps is None:
            return h
        y = h * (h.square().mean(-1, keepdim=True) + self.o.output_eps).rsqrt()
        return y if self.output_gain is None else y * self.output_gain

    def output_gradient(
        self, xs: list[Tensor], a: Tensor, dout: Tensor | None, t: slice, dgain: Tensor | None
    ) -> Tensor:
        """The gradient of the read before its output norm, (c, d); adds to that of the norm's gain."""
        if dout is None:
            return torch.zeros(xs[0].shape, dtype=self.dtype, device=xs[0].device)
        dy = dout.reshape(-1, self.d)[t].to(self.dtype)
        if self.o.output_eps is None:
            return dy
        h = self.mix(xs, a)
        r = (h.square().mean(-1, keepdim=True) + self.o.output_eps).rsqrt()
        if dgain is not None:
            dgain += (dy * h * r).sum(0)
        dy = dy if self.output_gain is None else dy * self.output_gain
        return r * dy - h * (r**3 / self.d * (dy * h).sum(-1, keepdim=True))

    def logit_gradient(self, a: Tensor, da: Tensor, t: slice) -> Tensor:
        """From the gradient of the weights to that of the logits: (n, c, H)."""
        if self.o.normalize == "softmax":
            return a * (da - (a * da).sum(0))
        if self.o.normalize == "sigmoid":
            return a * (1 - a) * da
        if self.bias is None:
            return da
        return da.masked_fill(self.rows(self.bias, t)[..., None] == -torch.inf, 0.0)

    def source_gradients(
        self,
        xs: list[Tensor],
        t: slice,
        a: Tensor,
        ds: Tensor,
        dots: Tensor,
        factors: Tensor,
        dmix: Tensor,
        dkeyed: Tensor,
        dsources: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Fill in this chunk of the sources' gradients and add to that of w; returns c and k of `pulled`."""
        c = ds * factors * self.o.scale
        inward = (c * dots).sum(-1, keepdim=True) * (factors**2 / -self.d)
        w, g = self.split(self.query(t)), self.split(dmix)
        dw = dkeyed if self.static else dkeyed[t]
        for x, ai, ci, back, whole in zip(xs, self.per_source(a), self.per_source(c), inward, dsources):
            x = x.to(self.dtype)
            self._add_keyed(x, ci, dw)
            if whole is None:
                continue
            d = whole[t]
            dx = d if d.dtype == self.dtype else torch.empty_like(x)
            split = self.split(dx)
            torch.mul(g, ai, out=split)
            split.addcmul_(w, ci)
            if self.o.eps is not None:
                dx.addcmul_(x, back)
            if dx is not d:
                d.copy_(dx)
        return c, inward.squeeze(-1) if self.o.eps is not None else torch.zeros_like(inward.squeeze(-1))

    def left(self, dots: Tensor) -> Left:
        """Room for what a pulled read leaves to its sources."""
        return Left(
            self.empty(self.dtype),
            torch.empty_like(dots),
            torch.empty_like(dots),
            torch.empty_like(dots[..., 0]),
            self.keyed,
        )

    def _add_keyed(self, x: Tensor, c: Tensor, dkeyed: Tensor) -> None:
        if not self.static:
            self.split(dkeyed).addcmul_(self.split(x), c)
        elif self.o.heads == 1:
            dkeyed.addmm_(c.mT, x)
        else:
            dkeyed += (self.split(x) * c).sum(0).flatten()

    def split_keyed(
        self, dkeyed: Tensor, query: Tensor, key_gain: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of query and key gain from that of their product w."""
        if key_gain is None:
            return dkeyed.view(query.shape).to(query.dtype), None
        dgain = (dkeyed * query.reshape(-1, self.d)).sum(0)
        dquery = (dkeyed * key_gain.to(self.dtype)).view(query.shape)
        return dquery.to(query.dtype), dgain.to(key_gain.dtype)
