"""One core by itself, with a memory, in float64."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.cache import Cache, Remembers, document_positions, name_slots, remembering
from twoaxis.sequence import Mixer
from twoaxis.types import Context, Layout, Reads

WINDOWED = {
    "attention(window=4)": 4,
    "attention(window=4, n_kv_heads=2, n_heads=4, qk_norm=True)": 4,
    "attention(window=4, pattern='SL')": 4,
    "short_swa(window=4)": 4,
    "short_swa(window=4, position='bias')": 4,
    "short_swa(window=4, position='none', sink=True)": 4,
    "short_swa(window=1)": 1,
    "short_swa(window=99)": 99,
    "attention": 99,
    "mlp": 1,
    "mlp(act='gelu')": 1,
    "parallel(mlp, short_swa(window=3))": 3,
    "attention(window=2, qkv='canon(kernel=3)')": 4,
    "mlp(hidden=6, input='token_shift', hidden_input='short_swa(window=2)')": 3,
    "residual(short_swa(window=3, value='identity', output='identity'))": 3,
    "short_conv(kernel=3, activation='silu', bias=True)": 3,
    "short_conv(form='lfm2', kernel=2)": 2,
    "canon": 4,
    "token_shift": 2,
}


def layout(**fields) -> Layout:
    return Layout(**{"d_model": 24, "blocks": (("mlp",),) * 2, "n_heads": 2, "n_kv_heads": 2, **fields})


def build(text: str, block: int = 0, **fields) -> Mixer:
    """The core of a spec, every parameter at a random point."""
    torch.manual_seed(0)
    cfg = spec.parse_spec("sequence", text)
    core = spec.method("sequence", cfg.name)(cfg, layout(**fields), block).double()
    with torch.no_grad():
        for p in core.parameters():
            p.copy_(torch.randn(p.shape, dtype=torch.float64) * (0.4 if p.ndim > 1 else 1))
    name_slots(core)
    return core.eval()


def inputs(batch: int = 1, length: int = 12, width: int = 24) -> Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def memory(core: Mixer, batch: int, max_rollback: int = 0) -> Cache:
    device = torch.device("cpu")
    slots = {
        name: part.new_slot(batch, None, max_rollback, torch.float64, device)
        for name, part in remembering(core)
        if isinstance(part, Remembers)
    }
    return Cache(slots, batch, max_rollback)


def at_once(core: Mixer, x: Tensor, segments: Tensor | None = None) -> Tensor:
    positions = None if segments is None else document_positions(segments)
    return core(Reads(x), Context(segments, positions))


def in_steps(core: Mixer, x: Tensor, sizes: list[int], segments: Tensor | None = None) -> Tensor:
    """The same outputs, fed in pieces through a memory."""
    cache = memory(core, len(x))
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    assert edges[-1] == x.shape[1]
    out = []
    for start, stop in pairwise(edges):
        ids = None if segments is None else segments[:, start:stop]
        ids, positions = cache.begin(stop - start, ids, None)
        out.append(core(Reads(x[:, start:stop]), Context(ids, positions, cache)))
        cache.advance(stop - start)
    return torch.cat(out, 1)


WAYS = {
    "at once": at_once,
    "one by one": lambda core, x, segments=None: in_steps(core, x, [1] * x.shape[1], segments),
    "pieces": lambda core, x, segments=None: in_steps(core, x, [3, 4, x.shape[1] - 7], segments),
}
