"""What the operators cost: FLOPs, and what they keep for backward, in the sizes of a `Tape`.

`mix`, `gated_mix`, `depth_read` and `delta_rewrite` keep their inputs and recompute; formulas count a
multiplication and an addition as two. Backward counts twice the forward pass. A tape of the native backend has one
kernel for a call that `ops/native` covers, which reads its inputs and writes its results once, each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twoaxis.ops import rebuilt
from twoaxis.ops.backends.plan import block_plan, kept_keys
from twoaxis.ops.native.delta_rewrite import CHANNELS
from twoaxis.ops.native.local_attention import WIDEST
from twoaxis.tape import Array, Tape


def mix(t: Tape, sources: Sequence[Array], weights: Sequence[Array] = (), by_token: bool = False) -> Array:
    """sum_j w_j x_j: 2 n d per token; sources and weights are kept. weights: those that are no parameters.

    by_token: the reader makes them, so that nothing can be summed before it.
    """
    made = t.like(sources[0])
    count = sum(2 * x.numbers for x in sources)
    n, fixed = len(sources), bool(weights) and all(w.constant for w in weights)
    keep = (*sources, *weights)
    name, moved = "mix" if by_token else "static mix", (3 * n - 1) * made.nbytes
    return t.run(name, keep, made, keep=keep, flops=count, launches=n, moved=moved, back=2 - fixed)


def depth_read(
    t: Tape,
    query: Array,
    sources: Sequence[Array],
    *,
    normed: bool,
    heads: int = 1,
    weights_only: bool = False,
    keep: Sequence[Array] = (),
    gain: bool = False,
    output_norm: bool = False,
) -> Array:
    """The read, or its weights (n per token and head): 2 n d to score, 2 n d for key norms, 2 n d to mix.

    It keeps query and sources, one number per source, token and head, and one for the key norm. keep: what
    else it is given (a bias). gain: of the keys. output_norm: with a gain, folded in.
    """
    n, x = len(sources), sources[0]
    rows = x.numbers // x.width
    native = t.backend == "native" and heads == 1 and all(native_source(s, x) for s in sources)
    dots = Array(n * rows * heads, n * heads, t.wide)
    norms = Array(n * rows, n, t.wide) if normed else t.table(1, t.wide)
    out = Array(n * rows * heads, n * heads, t.wide) if weights_only else t.like(x)
    flops = 2 * n * x.numbers * (1 + normed + (not weights_only))
    if native:
        maps = [dots, norms] if normed else [dots]
        moved = sum(x.nbytes for x in (query, *sources, out, *maps))
        about = {"launches": 1 + gain, "back_launches": 9, "moved": moved}  # the gain; sums over threads
        kept = (query, *maps, *keep, *sources)
        return t.run("depth_read", (query, *sources), out, keep=kept, flops=flops, native=True, **about)
    static = query.parameter and heads == 1
    launches = _read_launches(n, static, normed, gain, output_norm, bool(keep))
    return t.run(
        "depth_read",
        (query, *sources),
        out,
        keep=(query, dots, norms, *keep, *sources),
        flops=flops,
        launches=launches + weights_only,
        moved=((2 if weights_only else 4) + normed) * n * x.nbytes,
    )


def _read_launches(n: int, static: bool, normed: bool, gain: bool, output_norm: bool, biased: bool) -> int:
    """Kernels of a plain read of n sources: scores (a product each, or two steps), norms, weights, the mix."""
    scores = n * (1 if static else 2) + 2 + gain
    norms = 1 + (n + 6) * normed
    return scores + norms + 3 + 4 * biased + n + 1 + 6 * output_norm


def native_source(x: Array, first: Array) -> bool:
    """Whether a kernel reads it: plain memory of float32 or bfloat16, all sources alike."""
    return x.held is None and x.itemsize == first.itemsize and x.itemsize in (2, 4)


def gated_mix(
    t: Tape, sources: Sequence[Array], reads: int, gate: Array, normed: bool = False
) -> list[Array]:
    """sum_i (b_i + relu(<w, v_i>)) v_i, `reads` of them: 6 n d per token and read; sources are kept.

    normed: the gate reads rms(v_i).
    """
    made = [t.like(sources[0]) for _ in range(reads)]
    flops = 6 * reads * sum(x.numbers for x in sources)
    t.run(
        "gated_mix",
        (*sources, gate),
        *made,
        keep=(gate, *sources),
        flops=flops,
        launches=(2 * reads + 2 + 5 * normed) * len(sources) + reads,
        moved=(6 * reads + 1) * len(sources) * made[0].nbytes,
    )
    return made


def delta_rewrite(
    t: Tape, state: Array, direction: Array, value: Array, gate: Array, number: int | None = None
) -> Array:
    """X + gate k (v^T - k^T X): 4 d m per token; the inputs are kept. number: the state's in a chain that rebuilds."""
    inputs = (state, direction, value, gate)
    keep, again = rebuilt_keep(state, number)
    kept: dict[str, Any] = {"keep": (*keep, *inputs[1:]), "rebuilt": again, "flops": 4 * state.numbers}
    channels = state.width // direction.width
    covered = channels in CHANNELS and state.itemsize >= direction.itemsize and state.itemsize in (2, 4)
    if t.backend == "native" and covered and not t.decoding:
        return t.run("delta_rewrite", inputs, t.like(state), native=True, back_launches=3, **kept)
    return t.run(
        "delta_rewrite",
        inputs,
        t.like(state),
        launches=10 if channels == 1 else 9,
        moved=4 * state.nbytes,
        **kept,
    )


def channel_read(t: Tape, state: Array, weight: Array, width: int, number: int | None = None) -> Array:
    """Sum over channels: 2 d m per token; weights, and the state if no chain rebuilds it, are kept."""
    keep, again = rebuilt_keep(state, number)
    return t.run(
        "channel_read",
        (state, weight),
        t.array(width, state.itemsize),
        keep=(weight, *keep),
        rebuilt=again,
        flops=2 * state.numbers,
        launches=2,
        moved=3 * state.nbytes,
    )


def swiglu(t: Tape, x: Array, hidden: int) -> Array:
    """silu(gate) * up of one array: kept is that; plainly the activation as well."""
    if t.backend == "native" and native_source(x, x) and not t.decoding:
        return t.run("swiglu", (x,), t.array(hidden, x.itemsize), keep=(x,), native=True)
    return t.times(t.map("silu", x.view(hidden)), x.view(hidden))


def rebuilt_keep(
    state: Array, number: int | None, stride: int = rebuilt.STRIDE
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """What is kept of a state, and what only where blocks are recomputed, for a state of that number in a chain."""
    return ((state,), ()) if number is None or number % stride == 0 else ((), (state,))


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
    plan = block_plan(T, window, T)
    width = q.width // h
    pinned: list[Array] = []
    masks = [t.table(T, 8, constant=True)] if reach else []
    if sink_tokens and window is not None and (window < T or reach):
        rows = len(plan) * sink_tokens
        pinned = [t.table(t.batch_size * hkv * rows * width) for _ in "kv"]
        at = t.table(sink_tokens, 8, constant=True)
        copies = (
            [t.table(t.batch_size * rows, 8, constant=True) for _ in "kv"]
            if len(plan) > 1 < sink_tokens
            else []
        )
        pinned += copies
        masks += [at, t.table(rows, 1, constant=True), t.table(T, 1, constant=True)]
    elif not reach:
        shapes = {(b.stop - b.start, b.last - b.first, b.start - b.first) for b in plan}
        masks = [t.table(h // hkv * C * S, max(4, q.itemsize), constant=True) for C, S, _ in sorted(shapes)]
    inputs = (q, k, v, *pinned)
    launches = 6 * len(plan)
    return t.run(
        "blocked", inputs, out, keep=inputs, held=tuple(masks), flops=flops, launches=launches, product=True
    )
