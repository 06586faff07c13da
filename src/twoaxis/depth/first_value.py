"""What value residual methods share: the first attention's values V_1, kept for later attentions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.depth.connection import Connection, Core, DepthConfig, NamedStream, State
from twoaxis.depth.inside import attentions_at, attentions_before, run_inside
from twoaxis.depth.trace import Trace
from twoaxis.errors import InputError
from twoaxis.norm import RMSNorm
from twoaxis.tape import Array
from twoaxis.types import Context, Coordinates, Layout, Reads, TensorSpec


class FirstValueConfig(DepthConfig):
    """Options of a method whose attentions read V_1."""

    def heads(self, layout: Layout) -> tuple[int, int]:
        """(heads, width) of every attention's values; a model where they differ is refused."""
        found = [(a.heads, a.value) for a in attentions_before(layout, layout.n_blocks)]
        if not found:
            raise InputError(
                f"{self.name} reads the values of attention and no block has one; add 'attention'"
            )
        if len(set(found)) > 1:
            raise InputError(
                f"{self.name} needs values of one shape and this model has (heads, width) "
                f"{sorted(set(found))}; give every attention the same n_heads and n_kv_heads"
            )
        return found[0]

    def readers(self, layout: Layout) -> list[int]:
        """The attentions, numbered from 0 over the network, that read V_1."""
        self.heads(layout)
        return list(range(1, len(attentions_before(layout, layout.n_blocks))))

    def kept(self, layout: Layout, block: int, index: int = 0) -> bool:
        """Whether the state before a sublayer holds V_1."""
        done, readers = len(attentions_before(layout, block, index)), self.readers(layout)
        return bool(done and readers and readers[-1] >= done)

    def state_spec(self, layout: Layout, depth: int, tensor: TensorSpec) -> dict[str, TensorSpec]:
        """The state after `depth` blocks; `tensor` is like the stream."""
        if not self.kept(layout, depth):
            return {"stream": tensor}
        shape = (*tensor.shape[:2], *self.heads(layout))
        return {"stream": tensor, "value": TensorSpec(shape, tensor.dtype)}

    def weights(self) -> str:
        """Of what kind the weights are, for the coordinates."""
        return "fixed"

    def coordinates(self) -> Coordinates:
        return Coordinates(
            source="values of the first attention",
            weights=self.weights(),
            sharing="per attention",
            injection="replace",
            reads_per_block=1,
            short_swa="no: one source at a fixed depth and nothing is compared",
        )


class FirstValue(Connection):
    """read: norm(x); inside attention V becomes `values(V_1, V)`; write: x + y.

    state: {"stream": x, "value": V_1 (B, T, heads, D) as long as a later attention reads it}.
    """

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)
        first = len(attentions_before(layout, block, index))
        self.numbers = range(first, first + len(attentions_at(layout, block, index)))  # of its attentions
        readers = cfg.readers(layout)
        # what is asked while it runs has no number of its own: torch would compile every block anew
        self.reading = tuple(n in readers for n in self.numbers)
        self.makes = 0 in self.numbers
        self.keeps = cfg.kept(layout, block, index + 1)

    @abstractmethod
    def values(self, n: int, first: Tensor, own: Tensor | None, x: Tensor) -> Tensor:
        """V' (B, T, heads, D) of the sublayer's n-th attention from V_1, its own V and its input x (B, T, d)."""

    def begin(self, values: Tensor, dtype: torch.dtype, ctx: Context) -> tuple[Tensor, Tensor]:
        """What is kept as V_1, in the stream's dtype, and what the first attention attends to, from its values."""
        return values.to(dtype), values

    def forward(self, state: State, core: Core, ctx: Context) -> State:
        reads, _ = self.read(state, ctx)
        n, first = 0, state.get("value")

        def between(q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            nonlocal n, first
            if self.reading[n]:
                assert first is not None
                v = self.values(n, first, v, reads.x).to(q.dtype)
            assert v is not None
            if n == 0 and self.makes:
                first, v = self.begin(v, state["stream"].dtype, ctx)
            n += 1
            return q, k, v

        y = run_inside(core, reads, ctx, between)  # type: ignore[arg-type]
        return self.write(state, first, y, ctx)

    def read(self, state: State, ctx: Context) -> tuple[Reads, Tensor | None]:
        return Reads(self.norm(state["stream"])), state.get("value")

    def write(self, state: State, carry: Tensor | None, y: Tensor, ctx: Context) -> State:
        x = state["stream"] + y.to(state["stream"].dtype)
        return {"stream": x, "value": carry} if self.keeps else {"stream": x}


class FirstValueStream(NamedStream):
    """Opens with the embeddings, closes with the final norm; owns weights that all attentions share."""

    def __init__(self, cfg: Any, layout: Layout, shared: nn.Module | None = None) -> None:
        super().__init__(cfg, layout)
        self.shared = shared

    def open(self, x: Tensor, ctx: Context) -> State:
        return {"stream": x}

    def unchanging(self, name: str) -> bool:
        return name == "value"


class FirstValueTrace(Trace):
    """The same in sizes alone."""

    cfg: Any

    def open(self, x: Array) -> State:
        return {"stream": x}

    def unchanging(self, name: str) -> bool:
        return name == "value"

    def values(self, first: Array, own: Array | None, x: Array) -> Array:
        """V' from V_1, an attention's own V and its input."""
        return first

    def sublayer(self, state: State, core: Any, block: int, index: int) -> State:
        reads, _ = self.read(state["stream"], block, index)
        n, first = len(attentions_before(self.layout, block, index)), state.get("value")

        def between(q: Array, k: Array, v: Array | None) -> tuple[Array, Array, Array]:
            nonlocal n, first
            with self.t.of("depth"):
                if n in self.cfg.readers(self.layout):
                    v = self.t.cast(self.values(first, v, reads.x), q.itemsize)
                assert v is not None
                first = self.t.state(v) if n == 0 else first
            n += 1
            return q, k, v

        x = self.write(state["stream"], None, core(reads, between), block, index)
        return (
            {"stream": x, "value": first} if self.cfg.kept(self.layout, block, index + 1) else {"stream": x}
        )

    def close(self, state: State) -> Array:
        return super().close(state["stream"])
