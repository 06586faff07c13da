"""Softmax attention in sizes alone: projections, rotation, the operator, W_o."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twoaxis.ops.traced_tokens import attention
from twoaxis.sequence.mixer import Before, Between, Place
from twoaxis.sequence.rotary import trace_rotation as rotate
from twoaxis.tape import Array, Tape
from twoaxis.types import DTYPES, Shape

if TYPE_CHECKING:
    from twoaxis.sequence.attention_config import AttentionConfig


def trace(
    cfg: AttentionConfig,
    t: Tape,
    reads: Any,
    at: Place,
    between: Between | None = None,
    before: Before | None = None,
) -> Array:
    """A pass of the mixer. before: what a depth method puts before W_o; between: after the projections."""
    y: Any = _gathered(cfg, t, reads, at, between, before) if at.options.get("token_read", True) else None
    if before is not None:
        t.split()
        y = before(y)
        t.split()
    y = t.linear(y, at.layout.d_model) if cfg.output == "linear" else y
    return t.dropout(y, at.layout.dropout)


def _gathered(
    cfg: AttentionConfig, t: Tape, reads: Any, at: Place, between: Between | None, before: Before | None
) -> Array:
    """What W_o projects, the heads side by side."""
    q, k, v = _projected(cfg, t, reads, at)
    if (between, before) != (None, None):
        t.split()
    if between is not None:
        q, k, v = between(q, k, v)
    assert v is not None
    q, k, v = (cfg.inner_trace(name, t, x, at) for name, x in (("q", q), ("k", k), ("v", v)))
    if cfg.holds("qkv"):
        widths = (q.width, k.width, v.width)
        joined = t.run("cat", (q, k, v), t.array(sum(widths)))
        mixed = cfg.inner_trace("qkv", t, joined, at)
        q, k, v = (mixed.view(width) for width in widths)
    if rotated := cfg.rotated(at.layout):
        q, k = rotate(t, (q, k), cfg.heads(at.layout)[:2], rotated)
    return _read(cfg, t, q, k, v, at)


def _projected(cfg: AttentionConfig, t: Tape, reads: Any, at: Place) -> tuple[Array, Array, Array | None]:
    """q, k, v, or no v where the depth method supplies it."""
    h, hkv, width = cfg.heads(at.layout)
    x, makes = cfg.inner_trace("input", t, reads.x, at), at.options.get("value_projection", True)
    sizes = [h * width, hkv * width] + [hkv * width] * (makes and cfg.value == "linear")
    if reads.key is None and reads.value is None:
        whole = t.linear(x, sum(sizes))
        parts = [whole.view(size) for size in sizes]
        inputs = [x, x, x]
    else:
        inputs = [x, reads.key or x, reads.value or x]
        parts = [t.linear(u, size) for u, size in zip(inputs, sizes, strict=False)]
    q, k, *own = parts
    v = own[0] if own else None
    if makes and v is None:
        v = inputs[2] if cfg.value == "identity" else k
        if cfg.value == "key" and reads.value is not None:
            v = t.linear(inputs[2], sizes[1])
    if (norm := cfg.norm(at.layout)) != "none":
        q, k = (t.norm(x, groups=n if norm == "head" else 1) for x, n in ((q, h), (k, hkv)))
    return q, k, v


def _read(cfg: AttentionConfig, t: Tape, q: Array, k: Array, v: Array, at: Place) -> Array:
    """The operator itself; where decoding, on the cached rows."""
    h, hkv, width = cfg.heads(at.layout)
    values = cfg.value_width(at.layout)
    wide = max(width, values)
    if t.decoding:
        shape = Shape(layout=at.layout, batch_size=t.batch_size, seq_len=t.seq_len)
        rows = cfg.state_bytes(shape, at.block) // DTYPES[shape.dtype].itemsize
        k, v = (t.table(rows // 2, constant=True) for _ in "kv")
    elif width != values:
        pads = [(x, n) for x, n in ((q, h), (k, hkv), (v, hkv))]
        q, k, v = (x if x.width == n * wide else t.run("pad", (x,), t.array(n * wide)) for x, n in pads)
    y = attention(
        t, q, k, v, (h, hkv), _pairs(cfg, t, at.block), cfg.window_in(at.block),
        flops_width=width + values, **cfg.extras(t, at.layout),
    )  # fmt: skip
    if t.decoding:
        return y if width == values else t.array(h * values)
    return y if wide == values else t.run("cut", (y,), t.array(h * values))


def _pairs(cfg: AttentionConfig, t: Tape, block: int) -> int:
    """Visible pairs in a row; of a decoded token those of the last query."""
    return cfg.pairs(t.seq_len, block) - (cfg.pairs(t.seq_len - 1, block) if t.decoding else 0)
