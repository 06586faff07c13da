"""What the operators over tokens cost: convolution, and attention on the backend that takes it."""

from __future__ import annotations

from twoaxis.ops.backends.plan import block_plan, kept_keys
from twoaxis.ops.native.local_attention import WIDEST
from twoaxis.ops.traced import native_source
from twoaxis.tape import Array, Tape


def causal_conv(t: Tape, x: Array, weight: Array, kernel: int, channels: int = 1, flat: bool = True) -> Array:
    """K taps over tokens: 2 K per channel; kept is one padded copy of x, natively x itself.

    channels: made of each of x's. flat: x is (B, T, C) and the weight (C, K), which the native kernel asks for.
    """
    if t.backend == "native" and flat and channels == 1 and native_source(x, x) and not t.decoding:
        about = {"launches": 2, "back_launches": 4}  # the taps turned; theirs summed over threads
        return t.run(
            "conv",
            (x, weight),
            t.like(x),
            keep=(x, weight),
            flops=2 * kernel * x.numbers,
            native=True,
            **about,
        )
    wide = t.cast(x, max(4, x.itemsize))
    rows = wide
    if kernel > 1:
        past = t.batch_size * (kernel - 1) * x.width
        rows = t.run("pad", (wide,), Array(wide.numbers + past, x.width, wide.itemsize), launches=2)
    out = Array(wide.numbers * channels, x.width * channels, wide.itemsize)
    flops = 2 * kernel * out.numbers
    made = t.run(
        "conv",
        (rows, weight),
        out,
        keep=(rows, weight),
        flops=flops,
        launches=kernel,
        moved=kernel * (wide.nbytes + 2 * out.nbytes) - out.nbytes,
    )
    return t.cast(made, x.itemsize)


def attention(
    t: Tape,
    q: Array,
    k: Array,
    v: Array,
    heads: tuple[int, int],
    pairs: int,
    window: int | None,
    *,
    flops_width: int,
    plain: bool = True,
    biased: bool = False,
    sink_tokens: int = 0,
    reach: bool = False,
) -> Array:
    """Softmax attention on the backend that a CPU takes (see `local_attention`), of q, k (as wide as v).

    heads: H, H_kv. pairs: visible (query, key) pairs in a row: `flops_width`, key and value together, costs 2
    for each of them and head. Kept by torch's kernel: q, k, v, its result, one number per query and head, and a
    mask where the window needs one; by the native one the same without a mask. By the blocked one: q, k, v, the
    rows of sink tokens, and its masks. biased: with a position bias. plain: without that and sink logits.
    """
    T, (h, hkv) = t.seq_len, heads
    out = t.array(q.width)
    flops = 2 * h * flops_width * pairs * t.batch_size
    if t.decoding:
        return t.run("attention", (q, k, v), out, flops=flops, product=True)
    full = window is None or window >= T
    special = biased or reach or sink_tokens
    few = T <= 8 or kept_keys(T, T, window) <= 64
    if t.backend == "native" and not special and not few and q.width // h <= WIDEST and q.itemsize in (2, 4):
        lse = t.array(h, 4)
        return t.run(
            "native attention", (q, k, v), out, lse, keep=(q, k, v, out, lse), flops=flops, product=True
        )
    if plain and (full or T == 1 or kept_keys(T, T, window) <= 64):
        lse = t.array(h, max(4, q.itemsize))
        mask = [] if full else [t.table(T * T, constant=True)]
        keep = (q, k, v, out, lse, *mask)
        made = 9 * bool(mask)
        return t.run(
            "sdpa", (q, k, v, *mask), out, lse, keep=keep, flops=flops, product=True, launches=1 + made
        )
    size = max(4, q.itemsize)
    pinned, masks = _blocked_keeps(t, (h, hkv), q.width // h, size, window, sink_tokens, reach)
    inputs, launches = (q, k, v, *pinned), 6 * len(block_plan(T, window, T))
    return t.run(
        "blocked", inputs, out, keep=inputs, held=tuple(masks), flops=flops, launches=launches, product=True
    )


def _blocked_keeps(
    t: Tape,
    heads: tuple[int, int],
    width: int,
    itemsize: int,
    window: int | None,
    sink_tokens: int,
    reach: bool,
) -> tuple[list[Array], list[Array]]:
    """What the blocked backend keeps beside q, k, v: rows of sink tokens (and where they are), and masks."""
    T, (h, hkv) = t.seq_len, heads
    plan = block_plan(T, window, T)
    masks = [t.table(T, 8, constant=True)] if reach else []
    if sink_tokens and window is not None and (window < T or reach):
        rows = len(plan) * sink_tokens
        pinned = [t.table(t.batch_size * hkv * rows * width) for _ in "kv"]
        if len(plan) > 1 < sink_tokens:
            pinned += [t.table(t.batch_size * rows, 8, constant=True) for _ in "kv"]
        at = t.table(sink_tokens, 8, constant=True)
        return pinned, [*masks, at, t.table(rows, 1, constant=True), t.table(T, 1, constant=True)]
    if reach:
        return [], masks
    shapes = {(b.stop - b.start, b.last - b.first, b.start - b.first) for b in plan}
    return [], [t.table(h // hkv * C * S, itemsize, constant=True) for C, S, _ in sorted(shapes)]
