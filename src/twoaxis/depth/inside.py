"""Reach inside attention: work between its two halves, `project` and `attend`.

    q, k, v = project(reads);   q, k, v = between(q, k, v);   y = attend(q, k, v)

The attentions of a network are numbered in the order in which they run, those inside `parallel` one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence import AttentionConfig, Mixer, Parallel, SequenceConfig, SoftmaxAttention
from twoaxis.types import Context, Layout, Reads

Between = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


class Heads(NamedTuple):
    """The keys and values of one attention."""

    heads: int
    key: int  # width of a head's key
    value: int


def run_inside(core: Mixer, reads: Reads, ctx: Context, between: Between) -> Tensor:
    """The core's output y (B, T, d), with `between` put between the halves of each attention in it.

    between: q (B, T, H, D), k and v (B, T, Hkv, D), before rotation, to the same; v is None without W_v. It
    is called once per attention, in order. Cores that are no attention run as they are.
    """
    if isinstance(core, SoftmaxAttention):
        return core.attend(*between(*core.project(reads, ctx)), ctx)
    if isinstance(core, Parallel):
        first, *others = [run_inside(part, reads, ctx, between) for part in core.cores]  # type: ignore[arg-type]
        for y in others:
            first = first + y
        return first
    return core(reads, ctx)


def attentions_at(layout: Layout, block: int, index: int) -> list[Heads]:
    """The key/value heads of each attention in a sublayer, in order; empty for other cores."""
    found = configs_at(layout, block, index)
    return [Heads(*config.heads(layout)[1:], config.value_width(layout)) for config in found]


def configs_at(layout: Layout, block: int, index: int) -> list[AttentionConfig]:
    """The options of each attention in a sublayer, in order."""
    try:
        config = spec.parse_spec("sequence", layout.blocks[block][index])
    except InputError:  # a core of somebody's own
        return []
    return _attentions(config)


def _attentions(config: SequenceConfig) -> list[AttentionConfig]:
    if isinstance(config, AttentionConfig):
        return [config]
    if isinstance(config, Parallel.Config):
        return [found for part in config.parts() for found in _attentions(part)]
    return []


def attentions_before(layout: Layout, block: int, index: int = 0) -> list[Heads]:
    """Those of all sublayers before `index` of `block`; block L asks for the whole network's."""
    found: list[Heads] = []
    by_kind: dict[str, list[Heads]] = {}  # of a hundred blocks most are alike
    for b, kinds in enumerate(layout.blocks[: block + 1]):
        for i, kind in enumerate(kinds):
            if (b, i) < (block, index):
                if kind not in by_kind:
                    by_kind[kind] = attentions_at(layout, b, i)
                found += by_kind[kind]
    return found
