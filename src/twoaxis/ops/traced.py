"""What the operators cost: FLOPs, and what they keep for backward, in the sizes of a `Tape`.

`mix`, `gated_mix`, `depth_read` and `delta_rewrite` keep their inputs and recompute; formulas count a
multiplication and an addition as two. Backward counts twice the forward pass. A tape of the native backend has one
kernel for a call that `ops/native` covers, which reads its inputs and writes its results once, each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twoaxis.ops import rebuilt
from twoaxis.ops.native.delta_rewrite import CHANNELS
from twoaxis.tape import Array, Tape


def mix(t: Tape, sources: Sequence[Array], weights: Sequence[Array] = (), known: bool = False) -> Array:
    """sum_j w_j x_j: 2 n d per token; sources and weights are kept. weights: those that are no parameters.

    known: the loop over all layers knows them before it opens (`ops.known_mix`).
    """
    made = t.like(sources[0])
    count = sum(2 * x.numbers for x in sources)
    n, fixed = len(sources), bool(weights) and all(w.constant for w in weights)
    keep = (*sources, *weights)
    about: dict[str, Any] = {"launches": n, "moved": (3 * n - 1) * made.nbytes}
    if _by_kernel(t, sources):
        about = {"native": True, "back_launches": 2, "gathers": float(known)}
    return t.run("static mix", keep, made, keep=keep, flops=count, back=2 - fixed, **about)


def token_mix(t: Tape, sources: Sequence[Array], weights: Array, sums: int = 1) -> list[Array]:
    """`sums` of the sources by weights of each token: the reader makes them, so nothing can be summed before it."""
    n, made = len(sources), [t.like(sources[0]) for _ in range(sums)]
    count = sum(2 * x.numbers for x in sources)
    if _by_kernel(t, sources):
        keep = (*sources, weights)
        gathers = 1.0 if sources[0].itemsize < 4 else 0.25  # four sources at once
        about: dict[str, Any] = {"native": True, "back_launches": 2, "gathers": gathers, "looks": True}
        t.run("mix", keep, *made, keep=keep, flops=sums * count, **about)
        return made
    for one in made:
        keep = (*sources, weights.view(n))
        t.run("mix", keep, one, keep=keep, flops=count, launches=n, moved=(3 * n - 1) * one.nbytes)
    return made


def head_mix(t: Tape, sources: Sequence[Array], heads: Sequence[int], made: int) -> Array:
    """`made` heads of all heads of the sources, which are kept: 2 per number and head that is made.

    It is a kernel or a product for each source, which in the loop gathers its gradient."""
    n, first, of = len(sources), sources[0], heads[0]
    W = t.weight(sum(heads) * made)
    out = Array(first.numbers // of * made, first.width // of * made, first.itemsize)
    plain, keep = all(x.held is None for x in sources), (*sources, W)
    flops = sum(2 * x.numbers * made for x in sources)
    if _by_kernel(t, sources):
        about: dict[str, Any] = {"native": True, "launches": 3, "back_launches": n + 4}  # weights turned
        gathers = 1.0 if first.itemsize < 4 else 0.25  # four sources at once
        return t.run("head mix", keep, out, keep=keep, flops=flops, gathers=gathers, looks=True, **about)
    return t.run(
        "head mix",
        keep,
        out,
        keep=keep,
        flops=flops,
        launches=n if first.itemsize == t.wide else 2 * n + 1,  # into the dtype of sums
        moved=sum(x.nbytes for x in sources) + (2 * n - 1) * out.nbytes,
        product=True,
        gathers=float(plain and not t.decoding),
        looks=True,
    )


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
        about = {"launches": 1 + gain, "back_launches": 9, "moved": moved, "gathers": 1.0, "looks": True}
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
    scores = n * (1 if static else 2) + gain
    norms = 1 + (n + 4) * normed
    return scores + norms + 3 + 4 * biased + n + 7 * output_norm


def _by_kernel(t: Tape, sources: Sequence[Array]) -> bool:
    return t.backend == "native" and not t.decoding and all(native_source(x, sources[0]) for x in sources)


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
    if _by_kernel(t, sources):
        about: dict[str, Any] = {"native": True, "back_launches": 3, "gathers": 1.0}
        t.run("gated_mix", (*sources, gate), *made, keep=(gate, *sources), flops=flops, **about)
        return made
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
