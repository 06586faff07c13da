"""What reads over depth by known queries cost, in the sizes of a `Tape`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twoaxis.ops.traced import depth_read, native_source
from twoaxis.tape import Array, Tape


def known_read(t: Tape, query: Array, sources: Sequence[Array], gain: bool) -> Array:
    """A normed read by a known query, with its output norm (`ops/known_read.py`): in the loop it keeps its output and
    two numbers per token in place of the norms of keys, which each source has made once; recomputed, decoding or
    with sources of several kinds it is a `depth_read`."""
    if t.decoding or any(s.held is not None or s.itemsize != sources[0].itemsize for s in sources):
        return depth_read(t, query, sources, normed=True, gain=gain, output_norm=True)
    n, x, out = len(sources), sources[0], t.like(sources[0])
    rows = x.numbers // x.width
    dots, norms = Array(n * rows, n, t.wide), Array(n * rows, n, t.wide)
    lse, rho = Array(rows, 1, t.wide), Array(rows, 1, t.wide)
    fresh = {s.root for s in sources} - t.scaled
    t.scaled |= fresh
    inputs, scaling = (query, *sources), 5 * len(fresh)
    if t.backend == "native" and all(native_source(s, x) for s in sources):
        moved = sum(a.nbytes for a in (*inputs, out, dots, norms, lse, rho))
        about: dict[str, Any]
        launches, about = (
            4 + gain + scaling,
            {"native": True, "back_launches": 9, "gathers": 1.0},
        )  # the gain is looked at for a 0
    else:
        launches, moved, about = 2 * n + 19 + gain + scaling, (4 * n + 5) * x.nbytes, {}
    return t.run(
        "depth_read",
        inputs,
        out,
        keep=(query, dots, *sources),
        rebuilt=(norms,),
        looped=(lse, rho, out),
        flops=6 * n * x.numbers,
        launches=launches,
        moved=moved,
        **about,
    )
