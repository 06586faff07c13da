"""Cores that keep what they are given and put out a leaf, so that nothing passes through them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Core
from twoaxis.model.init import init_core
from twoaxis.sequence import Attention
from twoaxis.study.links import at_a_point, leaf
from twoaxis.types import Context, Layout, Reads


class Watch:
    """read: everything that sublayer `index` of `block` was given. output: what it put out, a leaf."""

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int, random: bool) -> None:
        self.read: list[Tensor] = []
        self.output = leaf(2)
        self.core: Core = self._plain
        if layout.blocks[block][index] == "attention":
            options = cfg.core_options_at(layout, block, index)
            attention = WatchedAttention(self, layout, block, **options)
            init_core(attention, layout)
            self.core = at_a_point(attention, random)

    def saw(self, *tensors: Tensor | None) -> None:
        """Note what was read."""
        self.read += [t for t in tensors if t is not None]

    def _plain(self, reads: Reads, ctx: Context) -> Tensor:
        self.saw(reads.x, reads.key, reads.value)
        return self.output


class WatchedAttention(Attention):
    """An attention that tells what its first and its last part are given: methods that reach inside work between."""

    watch: Watch

    def __init__(self, watch: Watch, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(spec.parse_spec("sequence", "attention"), layout, block, **options)
        self.watch = watch

    def project(self, reads: Reads, ctx: Context | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        self.watch.saw(reads.x, reads.key, reads.value)
        return super().project(reads, ctx)

    def finish(self, heads: Tensor) -> Tensor:
        self.watch.saw(heads)
        return self.watch.output
