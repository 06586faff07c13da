"""Several cores on one read, their outputs added: "parallel(attention, mlp)" (the GPT-J block)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence.mixer import Between, Mixer, Place, SequenceConfig, halo_max
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "parallel")
class Parallel(Mixer):
    """y = sum_i core_i(x)."""

    equation = "y = sum_i core_i(x)"
    source = "github.com/kingoflolz/mesh-transformer-jax"

    class Config(SequenceConfig):
        """cores: the specs of two or more cores, given as positional arguments."""

        specs_field = "cores"
        cores: tuple[str, ...] = ()

        def check(self) -> None:
            if self.cores:
                if len(self.cores) < 2:
                    raise InputError(
                        f"parallel{self.cores}: allowed is two or more cores, as in parallel(attention, mlp)"
                    )
                self.parts()

        def parts(self) -> list[SequenceConfig]:
            """The configs of the cores; attention and mlp when none are named."""
            parts = [spec.parse_spec("sequence", core) for core in self.cores or ("attention", "mlp")]
            for part in parts:
                if part.over([]) is not None:
                    raise InputError(
                        f"parallel(.., {part.spec()}): a preset makes a whole block; name cores here"
                    )
            return parts

        @property
        def accepts_qkv(self) -> bool:
            return any(part.accepts_qkv for part in self.parts())

        @property
        def products_first(self) -> bool:
            return all(part.products_first for part in self.parts())

        @property
        def kind(self) -> str:
            return f"parallel({', '.join(part.kind for part in self.parts())})"

        def halo_in(self, block: int = 0) -> int | None:
            return halo_max(*(part.halo_in(block) for part in self.parts()))

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens", weights="as its cores", sharing="per block", short_swa="as its cores"
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return self.cost_as_built(shape, block, {})

        def cost_as_built(self, shape: Shape, block: int, options: dict[str, Any]) -> Cost:
            return sum((part.cost_as_built(shape, block, options) for part in self.parts()), start=Cost())

        def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
            return t.add(*[part.trace(t, reads, at, between) for part in self.parts()])

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        self.cores = nn.ModuleList(
            spec.method("sequence", part.name)(part, layout, block, **options) for part in cfg.parts()
        )

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        first, *others = [core(reads, ctx) for core in self.cores]
        for y in others:
            first = first + y
        return first
