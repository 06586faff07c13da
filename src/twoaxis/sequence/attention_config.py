"""Options, sizes and costs that every softmax attention shares."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from twoaxis.errors import InputError
from twoaxis.ops import visible_pairs
from twoaxis.sequence.attention_trace import trace
from twoaxis.sequence.mixer import Before, Between, Place, halo_max, halo_sum
from twoaxis.sequence.nested import HostConfig, place
from twoaxis.tape import Array, Tape
from twoaxis.types import DTYPES, Cost, Layout, Shape


class AttentionConfig(HostConfig):
    """Options that every softmax attention shares. None takes the model's value.

    head_dim: width D of a head; None is d / H. rope_dims: how many features of each head are rotated, the first
    ones; None is all, 0 is none. qk_norm: True or "head" norms each head of q and k, "full" the whole vectors.
    input: a mixer before the projections. q, k, v: mixers on what they make, before the rotation; qkv: one
    mixer on all three side by side.
    """

    n_heads: int | None = None
    n_kv_heads: int | None = None
    head_dim: int | None = None
    rope_dims: int | None = None
    qk_norm: bool | Literal["head", "full"] | None = None
    input: str | None = None
    q: str | None = None
    k: str | None = None
    v: str | None = None
    qkv: str | None = None

    nested: ClassVar[tuple[str, ...]] = ("input", "q", "k", "v", "qkv")
    value = "linear"  # what values are made by: "linear", "key" (W_v = W_k) or "identity"
    output = "linear"  # and the output: "linear" or "identity"

    @property
    def accepts_qkv(self) -> bool:
        """A mixer before the projections mixes, and remembers, one input."""
        return self.input is None

    @property
    def products_first(self) -> bool:
        return self.input is None and self.value != "identity"

    @property
    def values_as_given(self) -> bool:
        """Whether the cache would hold values just as they are projected, in a plain window."""
        return not self.holds("v", "qkv")

    def check(self) -> None:
        super().check()
        for name in ("n_heads", "n_kv_heads", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(
                    f"{self.name}({name}={value}): allowed is 1 or more, or None for the model's"
                )
        if self.rope_dims is not None and (self.rope_dims < 0 or self.rope_dims % 2):
            raise InputError(
                f"{self.name}(rope_dims={self.rope_dims}): allowed is an even number of 0 or more, or None for all"
            )

    def heads(self, layout: Layout) -> tuple[int, int, int]:
        """(query heads H, key/value heads, head width D) in a model."""
        d, h = layout.d_model, self.n_heads or layout.n_heads
        hkv = self.n_kv_heads or (layout.n_kv_heads if self.n_heads is None else h)
        if (self.head_dim is None and d % h) or h % hkv:
            raise InputError(
                f"{self.name}: d_model={d}, n_heads={h}, n_kv_heads={hkv}: heads must divide d_model and "
                "key/value heads must divide heads"
            )
        width = self.head_dim or d // h
        if self.rotates and self.rope_dims is None and width % 2:
            raise InputError(
                f"{self.name}: d_model={d}, n_heads={h} give heads of width {width}, "
                "and rotation needs an even width; change one"
            )
        if (self.rope_dims or 0) > width:
            raise InputError(
                f"{self.name}(rope_dims={self.rope_dims}): heads have width {width}; give at most that"
            )
        return h, hkv, width

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are turned by their positions."""
        return self.rope_dims != 0

    def rotated(self, layout: Layout) -> int:
        """How many features of a head are rotated."""
        width = self.heads(layout)[2] if self.rope_dims is None else self.rope_dims
        return width if self.rotates else 0

    def value_width(self, layout: Layout) -> int:
        """The width of one head's values."""
        return self.heads(layout)[2]

    def norm(self, layout: Layout) -> Literal["none", "head", "full"]:
        """How queries and keys are normed."""
        given = layout.qk_norm if self.qk_norm is None else self.qk_norm
        return "full" if given == "full" else "head" if given else "none"

    def window_in(self, block: int) -> int | None:
        """The most positions that a query sees in a block, its own included; None: everything before."""
        raise NotImplementedError

    def pairs(self, seq_len: int, block: int) -> int:
        """How many (query, key) pairs are visible in one row."""
        return visible_pairs(seq_len, self.window_in(block))

    def halo_in(self, block: int = 0) -> int | None:
        window = self.window_in(block)
        branches = halo_max(*(self.inner_halo(name, block) for name in ("q", "k", "v")))
        own = None if window is None else window - 1
        return halo_sum(self.inner_halo("input", block), branches, self.inner_halo("qkv", block), own)

    def places(self, layout: Layout, options: dict[str, Any]) -> dict[str, Layout]:
        h, hkv, width = self.heads(layout)
        values = hkv * self.value_width(layout)
        return {
            "input": place(layout, layout.d_model, layout.n_heads, layout.n_kv_heads),
            "q": place(layout, h * width, h),
            "k": place(layout, hkv * width, hkv),
            "v": place(layout, values, hkv),
            "qkv": place(layout, (h + hkv) * width + values, h + 2 * hkv),
        }

    def projections(self, layout: Layout, value_projection: bool = True) -> int:
        """Numbers in W_q, W_k, W_v and W_o."""
        h, hkv, width = self.heads(layout)
        made = h + hkv * (2 if self.value == "linear" and value_projection else 1)
        out = h * self.value_width(layout) if self.output == "linear" else 0
        return layout.d_model * (made * width + out)

    def extra_parameters(self, layout: Layout) -> int:
        """Numbers learned beside projections: the norms of q and k."""
        h, hkv, width = self.heads(layout)
        return {"none": 0, "head": 2 * width, "full": (h + hkv) * width}[self.norm(layout)]

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        return self.cost_as_built(shape, block, {})

    def cost_as_built(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
        layout = shape.layout
        h, _, width = self.heads(layout)
        if not options.get("token_read", True):
            return self._output_cost(shape)
        numbers = self.projections(layout, options.get("value_projection", True))
        scores = (
            2 * h * (width + self.value_width(layout)) * self.pairs(shape.seq_len, block) * shape.batch_size
        )
        flops, state = 2 * numbers * shape.tokens + scores, self.state_bytes(shape, block)
        if not options.get("value_cache", True):
            state = state * width // (width + self.value_width(layout))
        own = Cost(
            parameters=numbers + self.extra_parameters(layout),
            flops_forward=flops,
            flops_backward=2 * flops,
            decode_state_bytes=state,
        )
        return own + self.inner_cost(shape, block, options)

    def _output_cost(self, shape: Shape) -> Cost:
        """Of W_o alone."""
        h, d = self.heads(shape.layout)[0], shape.layout.d_model
        numbers = h * self.value_width(shape.layout) * d if self.output == "linear" else 0
        flops = 2 * numbers * shape.tokens
        return Cost(parameters=numbers, flops_forward=flops, flops_backward=2 * flops)

    def trace(
        self, t: Tape, reads: Any, at: Place, between: Between | None = None, before: Before | None = None
    ) -> Array:
        return trace(self, t, reads, at, between, before)

    def extras(self, t: Tape, layout: Layout) -> dict[str, Any]:
        """What else the operator is given."""
        return {}

    def state_bytes(self, shape: Shape, block: int) -> int:
        """Bytes of the keys and values that decoding keeps."""
        _, hkv, width = self.heads(shape.layout)
        window = self.window_in(block)
        rows = shape.cache_rows(None if window is None else window - 1) * shape.batch_size
        return rows * hkv * (width + self.value_width(shape.layout)) * DTYPES[shape.dtype].itemsize
