"""The two ends of a depth method: how its state begins, how it ends, and what it is made of between blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from twoaxis.depth.ahead import normed
from twoaxis.depth.history import unchanging
from twoaxis.norm import RMSNorm
from twoaxis.types import Context, Layout, ParamRule, TensorSpec

State = Any  # a pytree of tensors and nothing else


class Stream(nn.Module, ABC):
    """The two ends of a method: from the embeddings to the first state, from the last state to the head."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.norm = RMSNorm(layout.d_model, layout.norm_eps)

    @abstractmethod
    def open(self, x: Tensor, ctx: Context) -> State:
        """The first state, from embeddings (B, T, d)."""

    @abstractmethod
    def close(self, state: State, ctx: Context) -> Tensor:
        """The normalised output (B, T, d), to the head."""

    @abstractmethod
    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        """Every tensor of the state after `depth` blocks, by name; the same name is the same value at every depth."""

    def loss_term(self, state: State) -> Tensor:
        """(B, T), from the last state: what training may add to each token's loss, if the options name a term."""
        raise NotImplementedError

    def unchanging(self, name: str) -> bool:
        """Whether a name in the state is one value at all depths: by default those that end in a number are."""
        return unchanging(name)

    def loose(self, depth: int) -> frozenset[int] | None:
        """Sources at a boundary that others than a `Reader` still read, by depth index; None: not only some.

        A set says that every other one can be summed for its readers (see `reader.py`).
        """
        return None

    def param_rule(self, name: str) -> ParamRule:
        """How the optimiser treats parameter `name` (relative to this module): by default it does not decay."""
        return ParamRule(decay=False)

    def spec_of(self, batch_size: int, seq_len: int, *channels: int) -> TensorSpec:
        """The spec of a (B, T, d, *channels) tensor in the state's dtype."""
        return TensorSpec((batch_size, seq_len, self.layout.d_model, *channels), self.layout.state_dtype)


class PlainStream(Stream):
    """The embeddings are the state; the final norm closes it."""

    def open(self, x: Tensor, ctx: Context) -> State:
        return x

    def close(self, state: State, ctx: Context) -> Tensor:
        return normed(self.norm, state)

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        return {"stream": self.spec_of(batch_size, seq_len)}


class NamedStream(Stream):
    """A state of named tensors, which the options list (`DepthConfig.state_spec`).

    By default the final norm of "stream" closes it.
    """

    def __init__(self, cfg: Any, layout: Layout) -> None:
        super().__init__(layout)
        self.cfg = cfg

    def close(self, state: State, ctx: Context) -> Tensor:
        return self.norm(state["stream"])

    def state_spec(self, depth: int, batch_size: int, seq_len: int) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = self.cfg.state_spec(
            self.layout, depth, self.spec_of(batch_size, seq_len)
        )
        return specs
