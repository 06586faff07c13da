"""The local-to-global block (arXiv 2603.16039, Algorithm 1), with any local mixer in the place of ShortSWA.

s = x + local(N_0(x));   a = s + attention(N_1(s));   x' = a + mlp(N_2(a))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence.mixer import Mixer, SequenceConfig
from twoaxis.sequence.preset import block_cost, refuse_as_core
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape


@spec.register("sequence", "local_to_global")
class LocalToGlobal(Mixer):
    """A preset: a local mixer as a sublayer of its own, before the block's other sublayers."""

    equation = "s = x + local(N0 x); a = s + attention(N1 s); x' = a + mlp(N2 a)"
    source = "arXiv 2603.16039"

    class Config(SequenceConfig):
        """mixer: the spec of the local mixer, such as "short_swa(window=128)", "short_conv" or "canon"."""

        mixer: str = "short_swa"

        def check(self) -> None:
            local: SequenceConfig = spec.parse_spec("sequence", self.mixer)
            if local.name != "local_to_global" and local.over([]) is None:
                object.__setattr__(self, "mixer", local.spec())
                return
            raise InputError(
                f"local_to_global(mixer={self.mixer!r}): a preset makes a whole block; name one mixer"
            )

        def over(self, others: list[SequenceConfig]) -> list[SequenceConfig] | None:
            names = (self.mixer,) if others else (self.mixer, "attention", "mlp")
            return [spec.parse_spec("sequence", name) for name in names] + others

        @property
        def accepts_qkv(self) -> bool:
            return True

        def coordinates(self) -> Coordinates:
            local: SequenceConfig = spec.parse_spec("sequence", self.mixer)
            return local.coordinates()

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return block_cost(self.over([]) or [], shape)

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        refuse_as_core(cfg)

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        raise NotImplementedError
