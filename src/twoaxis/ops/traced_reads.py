"""What reads over depth by known queries cost, in the sizes of a `Tape`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twoaxis.ops.traced import depth_read, native_source
from twoaxis.tape import Array, Tape


def known_read(
    t: Tape, query: Array, sources: Sequence[Array], gain: bool, output_norm: bool = True
) -> Array:
    """A normed read by a known query, with its output norm (`ops/known_read.py`): in the loop it keeps its output and
    two numbers per token, one without that norm, in place of the norms of keys, which each source has made once;
    recomputed, decoding or with sources of several kinds, or of two bytes and no output norm, it is a `depth_read`."""
    n, x = len(sources), sources[0]
    apart = any(s.held is not None or s.itemsize != x.itemsize for s in sources)
    if t.decoding or apart or (x.itemsize < 4 and not output_norm):
        return depth_read(t, query, sources, normed=True, gain=gain, output_norm=output_norm)
    out, rows = t.like(x), x.numbers // x.width
    dots, norms = Array(n * rows, n, t.wide), Array(n * rows, n, t.wide)
    scalars = [Array(rows, 1, t.wide) for _ in range(1 + output_norm)]  # log-sum-exp, rho
    fresh = {s.root for s in sources} - t.scaled
    t.scaled |= fresh
    inputs, scaling = (query, *sources), 5 * len(fresh)
    if t.backend == "native" and all(native_source(s, x) for s in sources):
        moved = sum(a.nbytes for a in (*inputs, out, dots, norms, *scalars))
        about: dict[str, Any] = {"native": True, "back_launches": 9, "gathers": 1.0}
        launches = 1 + 3 * output_norm + gain + scaling  # its gain is looked at for a 0
    else:
        launches = 2 * n + 9 + 10 * output_norm + gain + scaling
        moved, about = (4 * n + 2 + 3 * output_norm) * x.nbytes, {}
    return t.run(
        "depth_read",
        inputs,
        out,
        keep=(query, dots, *sources),
        rebuilt=(norms,),
        looped=(*scalars, out),
        flops=6 * n * x.numbers,
        launches=launches,
        moved=moved,
        **about,
    )
