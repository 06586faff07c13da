"""What the rooms pass to each other: contexts, reads, layouts, coordinates and costs.

Legend of shapes, used everywhere: B batch, T tokens, d model width, L blocks, H heads, D head width,
n sources of a depth read or streams, m value channels, w sequence window, K depth window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from twoaxis.cache import Cache

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# How many block states the read before a block sees, the current one included: a number, or a function of the
# block's index and the tokens' positions (T,) or (B, T), to a number or to one for each token (int64, same shape).
DepthRule = int | Callable[[int, Tensor], int | Tensor]


@dataclass(frozen=True, slots=True)
class Context:
    """What every read, write and core may know besides its input.

    segments: (B, T) int64 document id of each token, -1 is padding; None is one document per row.
    positions: (B, T) or (T,) int64 positions for the rotation; None counts on from what the cache has seen.
    cache: the decoding cache, or None when all tokens are given at once.
    depth_window: narrows the windows of methods that read a window of block states; None leaves them.
    """

    segments: Tensor | None = None
    positions: Tensor | None = None
    cache: Cache | None = None
    depth_window: DepthRule | None = None


@dataclass(frozen=True, slots=True)
class Reads:
    """What a connection hands to a core: the normalised input, and inputs of its own for keys and values."""

    x: Tensor  # (B, T, d)
    key: Tensor | None = None  # (B, T, d); None: x
    value: Tensor | None = None  # (B, T, d); None: x

    def to(self, dtype: torch.dtype) -> Reads:
        """The same inputs in a core's dtype, which may differ from the state's."""
        if self.key is None and self.value is None and self.x.dtype == dtype:
            return self
        key, value = (None if t is None else t.to(dtype) for t in (self.key, self.value))
        return Reads(self.x.to(dtype), key, value)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one named tensor of a state."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        itemsize: int = getattr(torch, self.dtype).itemsize
        return count * itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The model around a method: its width and, for each block, the specs of its sublayers.

    blocks: one tuple of sequence-axis specs per block, e.g. (("attention", "mlp(hidden=64)"),) * 12.
    history: how a depth method keeps earlier layers, "full" as they are (see `depth/history_spec.py`).
    """

    d_model: int
    blocks: tuple[tuple[str, ...], ...]
    n_heads: int = 1
    n_kv_heads: int = 1
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    qk_norm: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    state_dtype: str = "float32"
    history: str = "full"

    @property
    def n_blocks(self) -> int:
        """Number of blocks L."""
        return len(self.blocks)

    @property
    def n_sublayers(self) -> int:
        """Number of sublayers over all blocks."""
        return sum(len(kinds) for kinds in self.blocks)

    def sublayer(self, block: int, index: int) -> int:
        """The 0-based index over the whole network of sublayer `index` of `block`."""
        return sum(len(kinds) for kinds in self.blocks[:block]) + index


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size at which a cost is asked: the layout, B sequences of T tokens, and the activations' dtype.

    max_rollback: tokens that a decoding cache can take back.
    """

    layout: Layout
    batch_size: int
    seq_len: int
    dtype: str = "float32"
    max_rollback: int = 0

    @property
    def tokens(self) -> int:
        """B * T."""
        return self.batch_size * self.seq_len

    def cache_rows(self, keep: int | None) -> int:
        """Rows that a decoding slot holds which reads `keep` rows before a token (None: all of them)."""
        return self.seq_len if keep is None else keep + 1 + self.max_rollback


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """The duality paper's common coordinates of a method (arXiv 2603.16039, section 2.3)."""

    source: str  # what an earlier layer means: "stream", "branch", "block sum", "tokens"
    weights: str  # "fixed", "static", "gated", "QK, static Q" (a learned query), "QK"
    normalizer: str = "none"  # "none", "softmax", "sigmoid", "doubly stochastic"
    sharing: str = "per sublayer"
    injection: str = "add"  # "add", "replace", "rewrite", "mix", "gated"
    reads_per_block: float = 0  # in a block of two sublayers
    short_swa: str = "no"  # the exact relation to ShortSWA: "yes", "extended: how", "no: why"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Counts of one part or of a whole model; parts add up with +. None: the method does not say.

    parameters: numbers, flops: multiply and add counted apart, over all B * T tokens.
    decode_state_bytes: memory across tokens at T tokens. boundary_bytes: sent after a block, by transport
    (the largest boundary of the network). gradient_bytes, optimizer_bytes: of all parameters, and of AdamW's
    two moments. saved_bytes: kept between forward and backward; with every block recomputed, _checkpointed,
    and recomputed_bytes beside it while the largest block is. bytes_forward, bytes_backward: moved to and
    from memory at the fused limit; bytes_eager: kernel by kernel, as are launches.
    """

    parameters: int = 0
    flops_forward: int = 0
    flops_backward: int = 0
    decode_state_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int | None = None
    saved_bytes_checkpointed: int | None = None
    recomputed_bytes: int | None = None
    bytes_forward: int | None = None
    bytes_backward: int | None = None
    bytes_eager_forward: int | None = None
    bytes_eager_backward: int | None = None
    launches_forward: int | None = None
    launches_backward: int | None = None
    launches_fused_forward: int | None = None
    launches_fused_backward: int | None = None
    boundary_bytes: dict[str, int] = field(default_factory=dict)
    by_part: dict[str, Cost] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        numbers = {}
        for f in fields(self):
            pair = [x for x in (getattr(self, f.name), getattr(other, f.name)) if x is not None]
            if f.type in ("int", "int | None") and pair:
                numbers[f.name] = sum(pair)
        keys = self.boundary_bytes.keys() | other.boundary_bytes.keys()
        sent = {k: self.boundary_bytes.get(k, 0) + other.boundary_bytes.get(k, 0) for k in sorted(keys)}
        return replace(self, **numbers, boundary_bytes=sent, by_part={**self.by_part, **other.by_part})

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return self.flops_forward + self.flops_backward

    @property
    def bytes_moved(self) -> int | None:
        """Forward and backward together, at the fused limit."""
        return None if self.bytes_forward is None else self.bytes_forward + (self.bytes_backward or 0)

    @property
    def launches(self) -> int | None:
        """Forward and backward together, kernel by kernel."""
        return (
            None if self.launches_forward is None else self.launches_forward + (self.launches_backward or 0)
        )


@dataclass(frozen=True, slots=True)
class ParamRule:
    """How the optimiser treats one parameter: whether it decays, and a factor on its learning rate."""

    decay: bool
    lr_scale: float = 1.0


StandardStart = Literal["exact", "up to eps", "no"]
