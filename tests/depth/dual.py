"""The duality paper's read D on the transposed stack, and methods walked through sublayer by sublayer.

D(X; W_Q, W_K, W_V, K) = softmax((x_l W_Q) (X_win W_K)^T / sqrt(d_k)) X_win W_V            (arXiv 2603.16039)

with X the stack that a method reads and l its newest row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from points import CTX, perturb
from torch import Tensor

from twoaxis.depth import build
from twoaxis.ops import local_attention, reference, rms

WIDTH, EPS = 12, 1e-7
CLOSE = {"rtol": 0.0, "atol": 1e-12}
Sources = tuple[Tensor, ...]


def D(
    sources: Sources,
    W_Q: Tensor,
    W_K: Tensor | None = None,
    W_V: Tensor | None = None,
    window: int | None = None,
    *,
    as_query: Callable[[Tensor], Tensor] = lambda v: v,
    as_key: Callable[[Tensor], Tensor] = lambda v: v,
    heads: int = 1,
    sink_tokens: int = 0,
) -> Tensor:
    """The read of the newest source over the others, (B, T, d).

    W_K, W_V: None is the identity. as_query, as_key: how a source is seen by W_Q and W_K, the extensions: a
    coordinate that is always 1, a norm of keys. sink_tokens: sources that a window never loses.
    """
    X = torch.stack(sources, 2).flatten(0, 1)  # (B T, n, d): layers are positions
    q, k = as_query(X[:, -1:]) @ W_Q, as_key(X)
    k, v = k if W_K is None else k @ W_K, X if W_V is None else X @ W_V
    scale = (q.shape[-1] / heads) ** -0.5
    lacking = v.shape[-1] - q.shape[-1]  # keys of low rank: zeros change no score
    q, k = (torch.nn.functional.pad(x, (0, lacking)) for x in (q, k))
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    reads = [
        op(q, k, v, window, scale=scale, sink_tokens=sink_tokens)
        for op in (local_attention, reference.local_attention)
    ]
    torch.testing.assert_close(*reads, **CLOSE)
    return reads[0].transpose(1, 2).flatten(2).unflatten(0, sources[0].shape[:2]).squeeze(2)


def with_one(v: Tensor) -> Tensor:
    """The homogeneous coordinate: [v; 1]."""
    return torch.cat((v, torch.ones_like(v[..., :1])), -1)


def constant(w: Tensor, heads: int = 1) -> Tensor:
    """W_Q that is zero but for its last row, so that [v; 1] W_Q = sqrt(d_k) w."""
    W_Q = w.new_zeros(WIDTH + 1, len(w))
    W_Q[-1] = (len(w) / heads) ** 0.5 * w
    return W_Q


def attnres_read(c, V: Sources, heads: int = 1, rank: int = WIDTH, **options) -> Tensor:
    """D with what makes it the read of `c`: a constant query, keys rms(v) diag(g), W_V = I."""
    W_Q, W_K = constant(c.route.query, heads), c.route.key_gain.diag()
    as_key = lambda v: rms(v[..., WIDTH - rank :], EPS)  # noqa: E731
    return D(V, W_Q, W_K, as_query=with_one, as_key=as_key, heads=heads, **options)


def walk(spec: str, n_blocks: int = 3) -> list[tuple]:
    """(connection, the state it reads, every sublayer output so far, the embeddings first) of each sublayer."""
    torch.manual_seed(5)
    stream, blocks = build(spec, WIDTH, [["mlp", "mlp"]] * n_blocks)
    perturb(torch.nn.ModuleList([stream, *(c for made in blocks for c in made)]).double(), 0.5)
    outputs = [torch.randn(2, 3, WIDTH, dtype=torch.float64)]
    state, found = stream.open(outputs[0], CTX), []
    for c in (c for made in blocks for c in made):
        found.append((c, state, tuple(outputs)))
        outputs.append(torch.randn_like(outputs[0]))
        state = c(state, lambda reads, ctx: outputs[-1], CTX)
    return [*found, (stream, state, tuple(outputs))]


def moved_by_reordering(read: Callable[[Sources], Tensor], sources: Sources) -> float:
    """How far a read moves when its two oldest sources change places."""
    first, second, *others = sources
    moved = read((first, second, *others)) - read((second, first, *others))
    return float(moved.detach().abs().max())
