"""What `operators.py` compares of mixes by weights of each token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from operator_cases import Case, Run, both, copying, forward, two

from twoaxis.ops import choice, mix, token_mix
from twoaxis.ops.native import token_mix as native
from twoaxis.ops.token_mix import back
from twoaxis.ops.token_pull import TokenMixed, gathered


def token_mixes(dtype: torch.dtype) -> Iterator[Case]:
    """Four sums of the same sources, by themselves and as one mix for each; what the decoder's loop does backward."""
    lead, d, many = (4, 512), 512, 4
    library = choice.library("token_mix")
    for n in (13, 25):
        w = torch.randn(*lead, many, n).requires_grad_()
        xs = tuple(torch.randn(*lead, d).to(dtype).requires_grad_() for _ in range(n))
        fs = two(lambda w, *xs: torch.stack(token_mix(xs, w)))
        fs["a mix for each"] = lambda w, *xs: torch.stack([mix(xs, v.unbind(-1)) for v in w.unbind(-2)])
        name = f"4 sums of {n} sources of (4, 512, 512) by weights of each token"
        # torch.stack reads and writes the sums once more
        yield (
            f"{name}, forward",
            {who: forward(f, (w, *xs)) for who, f in fs.items()} | copying(n + 3 * many, xs[0]),
        )
        yield f"{name}, forward + backward", {who: both(f, (w, *xs)) for who, f in fs.items()}
        rows = [x.detach().view(-1, d) for x in xs]
        flat, grads, needed = w.detach().view(-1, many, n), list(rows[:many]), [False] * n
        left = [
            (TokenMixed(flat, {o: torch.randn_like(rows[0]) for o in range(many)}, ()), n - 1)
            for _ in range(n)
        ]
        weights: dict[str, Run] = {"plain": partial(back, flat, rows, grads, needed)}
        pulls: dict[str, Run] = {
            "plain": lambda left=left, x=rows[0]: [
                gathered(x, [(m, i - k) for m, i in left]) for k in range(4)
            ]
        }
        if library is not None:
            weights = {"native": partial(native.back, library, flat, rows, grads, needed), **weights}
            pulls = {"native": partial(native.gathered, library, rows[0], left, 4), **pulls}
        yield f"{name}, the weights' gradients", weights | copying(n + many, rows[0])
        yield f"four sources' gradients from {n} such mixes", pulls | copying(many * n + 4, rows[0])
