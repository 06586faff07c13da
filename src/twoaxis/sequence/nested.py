"""Mixers inside mixers: a nested spec stands at one place of a core, at the width of that place.

    attention(qkv="canon")      canon on the (H + 2 Hkv) D features that W_q, W_k, W_v make

A mixer needs to know nothing about it: the layout that it is given says the width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence.mixer import Mixer, Place, SequenceConfig
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Cost, Layout, Reads, Shape


class HostConfig(SequenceConfig):
    """Options of a core in which other mixers may stand; `nested` names the fields that hold their specs."""

    nested: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        for name in self.nested:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self.mixer_at(name).spec())

    def mixer_at(self, name: str) -> SequenceConfig:
        """The options of the mixer that stands at a place."""
        inner: SequenceConfig = spec.parse_spec("sequence", getattr(self, name))
        if inner.over([]) is not None:
            raise InputError(
                f"{self.name}({name}={inner.spec()!r}): a preset makes a whole block; name one mixer here"
            )
        return inner

    def places(self, layout: Layout, options: dict[str, Any]) -> dict[str, Layout]:
        """Every place of the core in a model, with the layout that a mixer there is built for."""
        raise NotImplementedError

    def inner(self, layout: Layout, options: dict[str, Any]) -> dict[str, tuple[SequenceConfig, Layout]]:
        """The mixers that stand in this core: place -> options and layout."""
        places = self.places(layout, options) if self.holds(*self.nested) else {}
        return {name: (self.mixer_at(name), at) for name, at in places.items() if self.holds(name)}

    def holds(self, *names: str) -> bool:
        """Whether a mixer stands at any of these places."""
        return any(getattr(self, name) is not None for name in names)

    def inner_cost(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
        """Counts of the mixers that stand in this core."""
        costs = (
            c.cost(replace(shape, layout=at), block) for c, at in self.inner(shape.layout, options).values()
        )
        return sum(costs, start=Cost())

    def inner_trace(self, name: str, t: Tape, x: Array, at: Place) -> Array:
        """x after the mixer at a place; x itself where none stands."""
        if not self.holds(name):
            return x
        layout = self.places(at.layout, at.options)[name]
        return self.mixer_at(name).trace(t, Reads(x), Place(layout, at.block))  # type: ignore[arg-type]

    def inner_halo(self, name: str, block: int) -> int | None:
        """The halo of the mixer at a place; 0 where none stands."""
        return self.mixer_at(name).halo_in(block) if self.holds(name) else 0


def place(layout: Layout, width: int, heads: int, kv_heads: int | None = None) -> Layout:
    """The layout of a place that is `width` wide. Dropout is the host's."""
    return replace(layout, d_model=width, n_heads=heads, n_kv_heads=kv_heads or heads, dropout=0.0)


def run_inner(mixers: nn.ModuleDict, name: str, x: Tensor, ctx: Context) -> Tensor:
    """x (B, T, width) after the mixer at a place, in x's dtype; x itself where none stands."""
    return mixers[name](Reads(x), ctx).to(x.dtype) if name in mixers else x


def build_inner(cfg: HostConfig, layout: Layout, block: int, options: dict[str, Any]) -> nn.ModuleDict:
    """The mixers that stand in a core, by place."""
    mixers = {}
    for name, (inner, at) in cfg.inner(layout, options).items():
        mixer: Mixer = spec.method("sequence", inner.name)(inner, at, block)
        for part in mixer.modules():
            if isinstance(part, Mixer):
                part.writes_stream = False
        mixers[name] = mixer
    return nn.ModuleDict(mixers)
