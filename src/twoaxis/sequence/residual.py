"""A mixer with its own residual: "residual(short_swa(window=8))", in the way of a Canon layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence.convolution import without_padding
from twoaxis.sequence.mixer import Between, Mixer, Place, SequenceConfig
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "residual")
class Residual(Mixer):
    """y = u + core(u): a mixer that is the identity where its core is zero."""

    equation = "y = u + core(u)"
    source = "arXiv 2512.17351"

    class Config(SequenceConfig):
        """cores: the spec of one core, given as a positional argument; short_swa when none is named."""

        specs_field = "cores"
        cores: tuple[str, ...] = ()

        def check(self) -> None:
            if len(self.cores) > 1:
                raise InputError(f"residual{self.cores}: allowed is one core, as in residual(short_swa)")
            for part in self.parts() if self.cores else ():
                if part.over([]) is not None:
                    raise InputError(f"residual({part.spec()}): a preset makes a whole block; name one core")

        def parts(self) -> list[SequenceConfig]:
            """The config of the core, in a list."""
            return [spec.parse_spec("sequence", *(self.cores or ("short_swa",)))]

        def halo_in(self, block: int = 0) -> int | None:
            return self.parts()[0].halo_in(block)

        def coordinates(self) -> Coordinates:
            return self.parts()[0].coordinates()

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return self.cost_as_built(shape, block, {})

        def cost_as_built(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
            return self.parts()[0].cost_as_built(shape, block, _with_values(options))

        def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
            inside = Place(at.layout, at.block, _with_values(at.options))
            return t.add(reads.x, self.parts()[0].trace(t, reads, inside))

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        (part,) = cfg.parts()
        self.core: Mixer = spec.method("sequence", part.name)(part, layout, block, **_with_values(options))

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        y = self.core(reads, ctx)
        return without_padding(reads.x.to(y.dtype) + y, ctx)


def _with_values(options: dict[str, Any]) -> dict[str, Any]:
    """An attention in here keeps its W_v: no depth method reaches inside to supply values."""
    return {**options, "value_projection": True}
