"""Options, places and costs of the two-axis hybrid."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from twoaxis import spec
from twoaxis.depth.block_states import StatesConfig
from twoaxis.depth.windowed import WindowedConfig
from twoaxis.errors import InputError
from twoaxis.sequence import AttentionConfig
from twoaxis.types import Coordinates, Cost, Layout, Shape


class HybridRead(WindowedConfig):
    """The hybrid's read over depth: that of depth_window(injection="replace"), whose W_V starts at the identity."""

    name: ClassVar[str] = "hybrid"

    injection: Literal["add", "replace", "gated"] = "replace"


class HybridConfig(StatesConfig):
    """Options of the hybrid.

    window_blocks: K of the depth read, None is all. shared: one W_Q, W_K, W_V of it for all blocks.
    heads: of the depth read. gate: one G per token ("scalar"), per head of the attention, or per channel.
    start: gamma, from 1 ("normal") or 0 ("zero"). axes: a letter for each block, repeated: B both axes
    and the gate between them, S the sequence alone, D depth alone; what S and D leave out is not built.
    """

    follows_rule: ClassVar[bool] = True

    window_blocks: int | None = None
    shared: bool = True
    heads: int = 1
    gate: Literal["scalar", "head", "channel"] = "scalar"
    start: Literal["normal", "zero"] = "normal"
    axes: str = "B"

    def check(self) -> None:
        if not re.fullmatch("[BSD]+", self.axes):
            raise InputError(
                f"hybrid(axes={self.axes!r}): allowed is a word of B (both), S (sequence) and D (depth) such as "
                "'BBSD', a letter for each block"
            )
        self.check_use(self.axes)
        self.read()

    def check_use(self, letters: str) -> None:
        """Refuse options of what no block with these letters has."""
        if "B" not in letters and self.gate != "scalar":
            raise InputError(
                f"hybrid(axes={self.axes!r}, gate={self.gate!r}): no block has a gate; leave gate out"
            )
        if set(letters) == {"S"} and self.read() != HybridRead():
            raise InputError(
                f"hybrid(axes={self.axes!r}): no block reads over depth; leave out window_blocks, shared and heads"
            )

    def history_options(self, kind: str, count: int) -> dict[str, Any]:
        return {"window_blocks": count} if kind == "window" else {}

    def read(self) -> HybridRead:
        """The options of the depth read."""
        return HybridRead(window_blocks=self.window_blocks, shared=self.shared, heads=self.heads)

    def letter(self, block: int) -> str:
        """The letter of a block."""
        return self.axes[block % len(self.axes)]

    def frozen(self, shares: Sequence[float | None], n_blocks: int) -> HybridConfig:
        if len(shares) != n_blocks:
            raise InputError(
                f"{len(shares)} letters or shares for {n_blocks} blocks: give S or D for each block"
            )
        letters = []
        for block, share in enumerate(shares):
            if share is not None and math.isnan(share):
                raise InputError(
                    f"block {block} has no share of the sequence to freeze by (nan): give one token or more that is no "
                    "padding, and a model whose numbers are finite"
                )
            before = self.letter(block)
            after = before if share is None else "S" if share >= 0.5 else "D"
            if before not in ("B", after):
                raise InputError(f"block {block} has no axis {after!r} to keep: it was built with {before!r}")
            letters.append(after)
        if set(letters) == {"S"}:  # nothing reads over depth
            return type(self)(start=self.start, axes="S")
        gate = self.gate if "B" in letters else "scalar"
        return replace(self, gate=gate, axes="".join(letters))

    def place(self, layout: Layout, block: int) -> tuple[int, int]:
        """Which sublayer of a block has the gate, and its number of heads."""
        self.check_use("".join(map(self.letter, range(layout.n_blocks))))
        for index, kind in enumerate(layout.blocks[block]):
            if heads := heads_of(kind, layout):
                return index, heads
        raise InputError(
            f"hybrid mixes into an attention and block {block} {list(layout.blocks[block])} has none of its own; "
            "add 'short_swa' or 'attention' to it"
        )

    def readers(self, layout: Layout) -> list[int]:
        """The blocks that read over depth."""
        return [block for block in range(layout.n_blocks) if self.letter(block) != "S"]

    def kept(self, layout: Layout, depth: int) -> int:
        """How many block states the state holds after `depth` blocks: as far as the next read sees."""
        later = [block for block in self.readers(layout) if block >= depth]
        if not later:
            return 1
        oldest = 0 if self.window_blocks is None else max(0, later[0] - self.window_blocks + 1)
        return depth + 1 - min(oldest, depth)

    def core_options_at(self, layout: Layout, block: int, index: int) -> dict[str, Any]:
        alone = self.letter(block) == "D" and index == self.place(layout, block)[0]
        return {"token_read": False} if alone else {}

    def gate_width(self, heads: int, d: int) -> int:
        """Gates of a token."""
        return {"scalar": 1, "head": heads, "channel": d}[self.gate]

    def coordinates(self) -> Coordinates:
        return Coordinates(
            source="stream",
            weights="QK",
            normalizer="softmax",
            sharing="network" if self.shared else "per block",
            injection="gated",
            reads_per_block=1,
            short_swa="yes: on both axes, w over tokens, K over depth, and a gate between them",
        )

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """That of depth_window's read in the blocks that read over depth, and 4 d flops per gate and token
        in those with a gate. What a block of one axis does not build shows in the cost of its attention.
        """
        layout, d, reads = shape.layout, shape.layout.d_model, self.read()
        reads.head_width(layout)
        counts = [reads.n_sources(block) for block in self.readers(layout)]
        places = [self.place(layout, block) for block in range(layout.n_blocks)]
        gates = sum(self.gate_width(heads, d) for b, (_, heads) in enumerate(places) if self.letter(b) == "B")
        flops = sum(reads.read_flops(n, d) for n in counts) + 4 * d * gates
        alone = sum(
            self.letter(block) == "D" for block in range(layout.n_blocks)
        )  # their norms are not built
        own = reads.read_parameters(counts, d) + gates * (2 * d + 1) + layout.n_blocks
        return self.network_cost(shape, own - alone * d, flops)


def heads_of(kind: str, layout: Layout) -> int:
    """The heads of an attention whose values make up the model's width; 0 for other sublayers."""
    try:
        config = spec.parse_spec("sequence", kind)
    except InputError:  # a core of somebody's own
        return 0
    if not isinstance(config, AttentionConfig):
        return 0
    heads, width = config.heads(layout)[0], config.value_width(layout)
    if heads * width != layout.d_model:
        raise InputError(
            f"hybrid mixes states of width {layout.d_model} into an attention and {kind!r} makes {heads} heads of "
            f"width {width}; leave out head_dim"
        )
    return heads
