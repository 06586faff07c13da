"""What the operators on several residual streams cost, as `traced` says it of the others."""

from __future__ import annotations

from twoaxis.ops.native.stream_gates import MOST
from twoaxis.ops.stream_scores import STRIDE
from twoaxis.ops.traced import rebuilt_keep
from twoaxis.tape import Array, Tape


def stream_scores(t: Tape, streams: Array, d: int, c: int, number: int) -> Array:
    """layer_norm(X_s) W: 2 c d for each stream; kept are streams and matrix. number: of the state in its chain."""
    keep, again = rebuilt_keep(streams, number, STRIDE)
    made = t.array(streams.width // d * c, t.wide)
    return t.run(
        "stream_scores",
        (streams, t.weight(d * c)),
        made,
        keep=keep,
        rebuilt=again,
        flops=2 * c * streams.numbers,
        launches=2,
        product=True,
        moved=4 * streams.nbytes + made.nbytes,
    )


def joint_scores(t: Tape, streams: Array, c: int, number: int) -> Array:
    """vec(X) W / rms: 2 c n d; kept are streams, matrix, the c results and a factor."""
    keep, again = rebuilt_keep(streams, number, STRIDE)
    made, factor = t.array(c, t.wide), t.array(1, t.wide)
    return t.run(
        "joint_scores",
        (streams, t.weight(streams.width * c)),
        made,
        keep=(*keep, made, factor),
        rebuilt=again,
        flops=2 * c * streams.numbers,
        launches=6,
        product=True,
        moved=2 * streams.nbytes + 4 * made.nbytes,
    )


def gates(t: Tape, scores: Array, n: int, mixes: bool = True) -> tuple[Array, Array, Array | None] | None:
    """What the kernel makes of scores: read and write (n of a token) and mixing (n x n); None where it does not."""
    if t.backend != "native" or t.decoding or t.wide != 4 or n > MOST:
        return None
    read, write = t.array(n, 4), t.array(n, 4)
    mixing = t.array(n * n, 4) if mixes else None
    made = (read, write) if mixing is None else (read, write, mixing)
    t.run("stream_gates", (scores,), *made, keep=(scores,), native=True, back_launches=3)
    return read, write, mixing


def stream_read(t: Tape, streams: Array, d: int, weights: Array, number: int) -> Array:
    """norm(sum_s w_s X_s): 2 n d; kept are streams and weights."""
    keep, again = rebuilt_keep(streams, number, STRIDE)
    made = t.array(d, streams.itemsize)
    return t.run(
        "stream_read",
        (weights, streams, t.weight(d)),
        made,
        keep=(*keep, weights),
        rebuilt=again,
        flops=2 * streams.numbers,
        launches=8,
        moved=streams.nbytes + 3 * made.nbytes,
        back=1 + (not weights.constant),
    )


def stream_write(
    t: Tape, streams: Array, mixing: Array | None, weights: Array, branch: Array, number: int
) -> Array:
    """M X + b y: 2 n^2 d and 2 n d; kept are streams (if they are mixed), mixing, weights and branch."""
    mixed = streams
    if mixing is not None:
        keep, again = rebuilt_keep(streams, number, STRIDE)
        flops = 2 * streams.numbers * (streams.width // branch.width)
        mixed = Array(streams.numbers, streams.width, t.wide)
        copied, kept = mixing.base is not None, (*keep, mixing)  # a view is made contiguous
        t.run(
            "stream_mix", (mixing, streams), mixed, keep=kept, rebuilt=again, flops=flops, launches=1 + copied
        )
    made = t.like(streams)
    return t.run(
        "stream_write",
        (weights, branch, mixed),
        made,
        keep=(weights, branch),
        flops=2 * streams.numbers,
        launches=1 + (weights.base is not None),
        back=1 + (not weights.constant),
    )
