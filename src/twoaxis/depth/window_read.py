"""The read of the depth window: attention of the current block state over the last ones and its injection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twoaxis.cache import Cache
from twoaxis.depth.window_rule import Logits, States, added
from twoaxis.linear import linear
from twoaxis.ops import depth_read, rms, rotate, token_mix
from twoaxis.ops.native import window_step
from twoaxis.ops.native.few_tokens import unwatched
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.ops.reference_steps import Projections
from twoaxis.sequence.rotary import rotary_angles
from twoaxis.types import Layout


class WindowRead(nn.Module):
    """z and its projections, d x d, bias-free, with heads of width D = d / heads.

    Over one state softmax is 1, so a read that never sees more has no W_Q, W_K and position bias. For
    injection "add" and "gated" W_V starts at zero, so that the model starts as the standard Transformer; for
    "replace" W_V and W_O start at the identity. The others start as N(0, init_std^2), bias and gate at zero.

    `forward` absorbs the projections: it scores raw states with W_K^T W_Q h and applies W_V once, after
    mixing. A rotation stands between the two, so with position="rope" it projects a key for each state.
    `attend` takes keys and values that were projected once per state and kept over depth, like a decoding
    cache. The network uses `forward`, which keeps one tensor per state.
    """

    def __init__(self, cfg: Any, layout: Layout, n_sources: int) -> None:
        super().__init__()
        d, std, several = layout.d_model, layout.init_std, n_sources > 1
        self.cfg, self.layout = cfg, layout
        self.width = cfg.head_width(layout)
        self.scale = self.width**-0.5
        replaces = cfg.injection == "replace"
        self.query = Projection(d, std) if several else None
        self.key = Projection(d, std) if several else None
        self.value = Projection(d, "identity" if replaces else 0.0)
        self.output = Projection(d, "identity" if replaces else std) if cfg.output else nn.Identity()
        biased = cfg.position == "bias" and several
        self.bias = nn.Parameter(torch.zeros(cfg.heads, n_sources)) if biased else None  # by distance
        self.gate = nn.Linear(d, 1) if cfg.injection == "gated" else None
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
            nn.init.zeros_(self.gate.bias)

    def inject(self, h: Tensor, z: Tensor) -> Tensor:
        """The block's input x (B, T, d) from its state and what was read."""
        if self.cfg.injection == "replace":
            return z.to(h.dtype)
        if self.gate is None:
            return h + z.to(h.dtype)
        with full_precision(h):
            dtype = compute_dtype(h)
            inner = rms(h.to(dtype), self.layout.norm_eps)
            g = F.linear(inner, self.gate.weight.to(dtype), self.gate.bias.to(dtype)).sigmoid()
            return torch.addcmul(h.to(dtype), g, z.to(dtype)).to(h.dtype)

    def forward(self, states: States, logits: Logits = None, cache: Cache | None = None) -> Tensor:
        """W_O z (B, T, d) from the states of a window; logits, one per state, are added to all heads' scores.

        cache: of a decoding step, which keeps W_K^T W_Q for all steps where blocks share them.
        """
        if len(states) > 1 and cache is not None and self.merges(states[-1], cache):
            return self.step(states, logits, cache)
        mixed = [states[-1]] * self.cfg.heads if len(states) == 1 else self.mixed(states, logits)
        W_V = self.value.weight.unflatten(0, (self.cfg.heads, self.width))
        parts = [linear(m.to(W.dtype), W) for m, W in zip(mixed, W_V, strict=True)]
        return self.output(torch.cat(parts, -1) if len(parts) > 1 else parts[0])

    def merges(self, h: Tensor, cache: Cache) -> bool:
        """Whether one product of both projections serves many steps and blocks."""
        simple = self.cfg.shared and self.cfg.heads == 1 and self.cfg.position == "none"
        steps = cache.length > 0 and not cache.fixed_shapes and not torch.is_grad_enabled()
        return simple and steps and h.dtype == self.value.weight.dtype != torch.bfloat16

    def step(self, states: States, logits: Logits, cache: Cache) -> Tensor:
        """The same with W_K^T W_Q multiplied beforehand: two products with matrices instead of three."""
        W = cache.once(("W_K W_Q", id(self)), lambda: self.absorbed(cache))
        q = linear(states[-1], W)
        mixed = depth_read(q, states, key_norm_eps=None, scale=self.scale, bias=logits)
        z: Tensor = self.output(linear(mixed, self.value.weight))
        return z

    def absorbed(self, cache: Cache) -> Tensor:
        """W_K^T W_Q (heads d, d), of each head."""
        assert self.query is not None
        assert self.key is not None
        both = self.query.weight, self.key.weight
        W_Q, W_K = (W.unflatten(0, (self.cfg.heads, self.width)) for W in both)
        return cache.made_of(both, lambda: (W_K.mT @ W_Q).flatten(0, 1))

    def prepared(self, cache: Cache | None) -> window_step.Prepared | None:
        """For the kernel of a decoding step, once for all reads of a pass; None where no kernel covers them."""
        if cache is None or not cache.length or cache.fixed_shapes:
            return None
        found: window_step.Prepared | None = cache.once(
            ("window step", id(self)), lambda: self._prepared(cache)
        )
        return found

    def _prepared(self, cache: Cache) -> window_step.Prepared | None:
        cfg, parts = self.cfg, (self.query, self.key, self.value, self.output)
        ours = all(m is None or type(m) in (Projection, nn.Identity) for m in parts)
        merges = (
            cfg.shared and cfg.heads <= 2 and cfg.position != "rope"
        )  # more heads: more than two matrices
        if not (ours and merges and window_step.runs() and self.value.weight.dtype == torch.float32):
            return None
        if not all(m is None or unwatched(m) for m in (self, self.gate, *parts)):
            return None
        query = None if self.query is None else self.absorbed(cache)
        output = self.output.weight if isinstance(self.output, Projection) else None
        return window_step.prepare(
            Projections(
                query, self.value.weight, output, self.bias, cfg.heads, self.scale, self.layout.norm_eps
            )
        )

    def mixed(self, states: States, logits: Logits = None) -> list[Tensor]:
        """sum_j a_hj h(j) (B, T, d) of each head h."""
        assert self.query is not None
        assert self.key is not None
        if self.cfg.position == "rope":
            weights = self.weights(states[-1], tuple(self.key(s) for s in states), logits)
            return list(token_mix(states, weights))
        q = self.query(states[-1]).unflatten(-1, (self.cfg.heads, self.width))
        W_K = self.key.weight.unflatten(0, (self.cfg.heads, self.width))
        reads = []
        for head, (q_h, W) in enumerate(zip(q.unbind(-2), W_K, strict=True)):
            by_age = None if self.bias is None else self.bias[head, : len(states)].flip(0)
            bias = by_age if logits is None else added(None if by_age is None else by_age.unbind(), logits)
            absorbed = linear(q_h, W.mT)
            reads.append(depth_read(absorbed, states, key_norm_eps=None, scale=self.scale, bias=bias))
        return reads

    def project(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A state's key and value (B, T, d), to be kept over depth."""
        assert self.key is not None
        return self.key(state), self.value(state)

    def attend(self, state: Tensor, keys: States, values: States) -> Tensor:
        """W_O z (B, T, d) from the current state and the window's keys and values: equals `forward`."""
        weights = self.weights(state, keys)
        heads = tuple(v.unflatten(-1, (self.cfg.heads, self.width)) for v in values)
        (mixed,) = token_mix(heads, weights.unsqueeze(-2))
        return self.output(mixed.flatten(-2))

    def weights(self, state: Tensor, keys: States, logits: Logits = None) -> Tensor:
        """a (B, T, heads, n) of the current state over the window's keys (B, T, d)."""
        assert self.query is not None
        q, *k = (x.unflatten(-1, (self.cfg.heads, self.width)) for x in (self.query(state), *keys))
        if self.cfg.position == "rope":
            layers = torch.arange(len(k), device=q.device)
            cos, sin = rotary_angles(layers, self.width, self.layout.rope_base, q.dtype)  # (n, 1, D/2)
            q, k = rotate(q, cos[-1], sin[-1]), [rotate(x, cos[j], sin[j]) for j, x in enumerate(k)]
        bias: Logits = None
        if self.bias is not None:
            bias = [b.expand(q.shape[:-1]) for b in self.bias[:, : len(k)].flip(1).unbind(1)]
        if logits is not None:  # () or (B, T): the same for all heads
            bias = added(bias, [x[..., None].expand(q.shape[:-1]) for x in logits])
        _, weights = depth_read(
            q, tuple(k), key_norm_eps=None, scale=self.scale, bias=bias, return_weights=True
        )
        return weights


class Projection(nn.Linear):
    """A d x d matrix that takes states of any dtype; N(0, std^2), or the identity."""

    def __init__(self, d: int, start: Any) -> None:
        super().__init__(d, d, bias=False)
        if start == "identity":
            nn.init.eye_(self.weight)
        else:
            nn.init.normal_(self.weight, std=start)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.to(self.weight.dtype), self.weight)
