"""The depth axis: a connection is a read and a write, a stream is a method's two ends.

    state --read--> Reads --core--> y --write--> state

A method is one registered connection class: its options (`Config`), what it reads, what it writes, and, if
they are not the plain ones, how its connections are made for a block and its stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.history_spec import parse_history, settled
from twoaxis.depth.stream import NamedStream, PlainStream, State, Stream
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.ops.native.stream_pass import Taking
from twoaxis.types import Context, Cost, Layout, ParamRule, Reads, Shape, TensorSpec

__all__ = [
    "Connection",
    "Core",
    "DepthConfig",
    "NamedStream",
    "PlainStream",
    "State",
    "Stream",
    "accepts_qkv",
    "build",
    "products_first",
    "qkv_index",
]

Core = Callable[[Reads, Context], Tensor]


class DepthConfig(spec.Config):
    """Options of a depth method.

    follows_rule: whether its reads heed `Context.depth_window`. loss_term: the name of a number per token that
    its stream makes of the last state and that training may add to the loss (`Stream.loss_term`); "" is none.
    trace: the method in sizes alone; None leaves out the counts that are derived from it, `untraced` says why.
    """

    follows_rule: ClassVar[bool] = False
    loss_term: ClassVar[str] = ""

    keeps_history: ClassVar[bool] = False  # whether `History` holds its earlier layers
    trace: ClassVar[Any] = None  # trace(cfg, layout, tape) -> Trace
    untraced: ClassVar[str] = "it has no trace, which would say what it runs"

    @property
    def pushes(self) -> bool:
        """Whether a pipeline may sum sources ahead for their readers: its stream says which (`Stream.loose`)."""
        return False

    def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
        """The state after `depth` blocks, of a method whose stream is a `NamedStream`; `tensor` is like x (B, T, d)."""
        return {"stream": tensor}

    def cost(self, shape: Shape, block: int = 0) -> Cost:
        """What the method costs over the whole network, its pre-norms and final norm included."""
        raise NotImplementedError

    def network_cost(self, shape: Shape, parameters: int, flops: int) -> Cost:
        """The cost of one norm a sublayer and the final one, so many parameters besides, so many FLOPs for each token
        forward and twice that backward, and the largest state at a boundary.
        """
        layout = shape.layout
        tensor = TensorSpec((shape.batch_size, shape.seq_len, layout.d_model), layout.state_dtype)
        states = [self.state_spec(layout, depth, tensor) for depth in range(layout.n_blocks + 1)]
        return Cost(
            parameters=(layout.n_sublayers + 1) * layout.d_model + parameters,
            flops_forward=flops * shape.tokens,
            flops_backward=2 * flops * shape.tokens,
            boundary_bytes={"full": max(sum(t.nbytes for t in state.values()) for state in states)},
        )

    def frozen(self, shares: Sequence[float | None], n_blocks: int) -> DepthConfig:
        """These options with every gate between the two axes set for good, by each block's share of the sequence.

        shares: one for each of the network's blocks; None leaves a block as it is.
        """
        raise InputError(f"{self.name} has no gate between the two axes to freeze, as hybrid has")

    def core_options(self, kind: str, block: int, n_blocks: int) -> dict[str, Any]:
        """How the core called `kind` in `block` is built differently, in the options of `Mixer`."""
        return {}

    def core_options_at(self, layout: Layout, block: int, index: int) -> dict[str, Any]:
        """The same for one sublayer; overridden where its place in the network counts."""
        return self.core_options(layout.blocks[block][index].split("(")[0], block, layout.n_blocks)

    def history_options(self, kind: str, count: int) -> dict[str, Any]:
        """The own options that `history="window(count)"` or "block_sums(count)" stands for; empty: it has none."""
        return {}


class Connection(nn.Module, ABC):
    """One sublayer's read and write. Concrete connections are final and owned by one block.

    cfg: the method's options. layout: the model around it. block, index: which sublayer of which block.
    """

    Config: ClassVar[type[DepthConfig]] = DepthConfig
    method_name: ClassVar[str] = ""
    equation: ClassVar[str] = ""  # one line, in the paper's symbols
    source: ClassVar[str] = ""  # arXiv id or where it is from

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__()
        self.cfg, self.layout, self.block, self.index = cfg, layout, block, index

    @abstractmethod
    def read(self, state: State, ctx: Context) -> tuple[Reads, Any]:
        """The sublayer's normalised input(s), and whatever the write needs of this read."""

    @abstractmethod
    def write(self, state: State, carry: Any, y: Tensor, ctx: Context) -> State:
        """The state with the sublayer's output y (B, T, d) put back. Never changes `state` in place."""

    @property
    def opening(self) -> RMSNorm | None:
        """The norm of the state by which `read` begins and after which it needs the state no more (see `ahead.py`)."""
        return None

    def taking(self, streams: int) -> Taking | None:
        """How `read` takes of that many streams by a kernel, which the write before may do for it (see `ahead.py`)."""
        return None

    def expected_depth(self, state: State, ctx: Context) -> Tensor | None:
        """(B, T): how many states its read counts on, where the model learns it; None where it does not."""
        return None

    def read_widest(self) -> None:
        """Set what decides how many states a read sees so that it sees all that it can: what its cost counts."""

    def forward(self, state: State, core: Core, ctx: Context) -> State:
        """Read, run the core, write."""
        reads, carry = self.read(state, ctx)
        return self.write(state, carry, core(reads, ctx), ctx)

    def param_rule(self, name: str) -> ParamRule:
        """How the optimiser treats parameter `name` (relative to this module): by default it does not decay."""
        return ParamRule(decay=False)

    @classmethod
    def for_block(cls, cfg: Any, layout: Layout, block: int) -> list[Connection]:
        """The connections of one block; a method may share modules between them."""
        return [cls(cfg, layout, block, index) for index in range(len(layout.blocks[block]))]

    @classmethod
    def every(cls, cfg: Any, layout: Layout, *shared: Any) -> list[list[Connection]]:
        """All connections of the network, each given what they share: for a `network` of one's own."""
        return [
            [cls(cfg, layout, block, index, *shared) for index in range(len(kinds))]
            for block, kinds in enumerate(layout.blocks)
        ]

    @classmethod
    def stream(cls, cfg: Any, layout: Layout) -> Stream:
        """The method's two ends."""
        return PlainStream(layout)

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        """The stream and every block's connections; a method may share modules over the whole network.

        A module shared by several blocks is registered in the stream and only referred to by the connections.
        """
        blocks = [cls.for_block(cfg, layout, block) for block in range(layout.n_blocks)]
        return cls.stream(cfg, layout), blocks


def accepts_qkv(kind: str) -> bool:
    """Whether a sublayer kind takes inputs of its own for keys and values; unknown kinds do not."""
    try:
        return bool(spec.parse_spec("sequence", kind).accepts_qkv)
    except InputError:
        return False


def products_first(kind: str) -> bool:
    """Whether a sublayer kind gives its inputs to matrix products alone; unknown kinds do not."""
    try:
        return bool(spec.parse_spec("sequence", kind).products_first)
    except InputError:
        return False


def qkv_index(layout: Layout, block: int, method_name: str) -> int:
    """The first sublayer of a block that takes separate q, k, v inputs; a block without one is refused."""
    for index, kind in enumerate(layout.blocks[block]):
        if accepts_qkv(kind):
            return index
    raise InputError(
        f"{method_name} makes separate q, k, v inputs and block {block} {list(layout.blocks[block])} has no sublayer "
        "that takes them; add 'attention' or 'short_swa' to it"
    )


def build(
    method: str | DepthConfig, d_model: int, blocks: Sequence[Sequence[str]], **layout: Any
) -> tuple[Stream, list[list[Connection]]]:
    """A depth method for a model of your own: its stream and, for each block, one connection per sublayer.

    method: a spec such as "hyper_connections(streams=4)". blocks: the kinds of each block's sublayers, e.g.
    [["attention", "mlp"]] * 12. Further Layout fields (norm_eps, state_dtype, ...) may be given.
    """
    if any(isinstance(block, str) for block in blocks):
        raise InputError(
            f"blocks={blocks!r}: give a list of kinds for each block, as in [['attention', 'mlp']]"
        )
    if type(d_model) is not int or d_model < 1:
        raise InputError(f"d_model={d_model!r}: allowed is an integer of 1 or more")
    cfg, history = settled(spec.parse_spec("depth", method), parse_history(layout.pop("history", "full")))
    plan = Layout(d_model=d_model, blocks=tuple(tuple(b) for b in blocks), history=history.text(), **layout)
    method_class: type[Connection] = spec.method("depth", cfg.name)
    return method_class.network(cfg, plan)
