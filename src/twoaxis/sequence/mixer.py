"""The sequence axis: a core maps what a connection read, (B, T, d), to what it will write, (B, T, d)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from twoaxis import spec
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Cost, Layout, Reads, Shape

Between = Callable[[Array, Array, Array | None], tuple[Array, Array, Array]]  # q, k, v of an attention
Before = Callable[
    [Array | None], Array
]  # what W_o takes, from the heads side by side; None where none are built


def halo_sum(*halos: int | None) -> int | None:
    """The halo of mixers one after another."""
    return None if None in halos else sum(h for h in halos if h is not None)


def halo_max(*halos: int | None) -> int | None:
    """The halo of mixers side by side."""
    return None if None in halos else max((h for h in halos if h is not None), default=0)


@dataclass(frozen=True)
class Place:
    """Where a core stands: the layout and block it is built for, and how the depth method has it built."""

    layout: Layout
    block: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class SequenceConfig(spec.Config):
    """Options of a core."""

    @property
    def accepts_qkv(self) -> bool:
        """Whether the core takes inputs of its own for keys and values."""
        return False

    @property
    def products_first(self) -> bool:
        """Whether matrix products alone see the core's inputs, so that they may come rounded as these round them."""
        return False

    @property
    def kind(self) -> str:
        """What a depth method is told of this core: its name, without options."""
        return self.name

    def over(self, others: list[SequenceConfig]) -> list[SequenceConfig] | None:
        """For a preset: the block that it makes of the block's other sublayers. None: this is a sublayer."""
        return None

    def halo_in(self, block: int = 0) -> int | None:
        """Tokens to the left of a token that its output may depend on, in a block; None: all of them.

        A sequence can be split where each part is also given the halo before it.
        """
        return None

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """Counts of this core in one block."""
        raise NotImplementedError

    def cost_as_built(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
        """Counts of this core in one block as a depth method has it built, in the options of `Mixer`."""
        return self.cost(shape, block)

    def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
        """y from the core's inputs, in sizes alone. between: what a depth method does inside attention."""
        raise NotImplementedError


class Mixer(nn.Module, ABC):
    """A sublayer's core. Concrete cores are final.

    cfg: the core's options. layout: the model around it. block: the index of the block it stands in.
    Some depth methods ask for a core that is built differently, and a core heeds what concerns it:
    output_scale: a factor on the init of the output projection. hidden_scale: a factor on the inner width of
    an MLP. value_projection: False leaves out an attention's W_v; the method then supplies the values.
    value_cache: False keeps no values when decoding; the method then supplies those of earlier tokens too.
    token_read: False leaves out all of an attention but W_o; the method then supplies what W_o projects.
    """

    Config: ClassVar[type[SequenceConfig]] = SequenceConfig
    method_name: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def __init__(
        self,
        cfg: Any,
        layout: Layout,
        block: int,
        *,
        output_scale: float = 1.0,
        hidden_scale: float = 1.0,
        value_projection: bool = True,
        value_cache: bool = True,
        token_read: bool = True,
    ) -> None:
        super().__init__()
        self.cfg, self.layout, self.block = cfg, layout, block
        self.output_scale, self.hidden_scale = output_scale, hidden_scale
        self.value_projection, self.value_cache, self.token_read = value_projection, value_cache, token_read
        self.writes_stream = True  # False for a mixer inside another: its output is not added to the stream

    @property
    def halo(self) -> int | None:
        """Tokens to the left of a token that its output may depend on; None: all of them."""
        halo: int | None = self.cfg.halo_in(self.block)
        return halo

    @property
    def accepts_qkv(self) -> bool:
        """Whether `forward` uses `reads.key` and `reads.value`."""
        return bool(self.cfg.accepts_qkv)

    def output_layers(self) -> list[nn.Linear]:
        """The projections that write to the residual stream; the model's init scales them down."""
        return []

    @abstractmethod
    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        """The core's output y (B, T, d)."""
