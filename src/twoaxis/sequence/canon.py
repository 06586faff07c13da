"""Canon layers: a short convolution with its own residual, at up to four points of a block.

    canon(u)_t = u_t + sum_{j<K} w_j * u_{t-j}                          (arXiv 2512.17351)

    A  after the norm before attention          attention(input="canon")
    B  on q, k, v side by side, after QK-norm   attention(qkv="canon")
    C  after the norm before the MLP            mlp(input="canon")
    D  on what W_gate and W_up make             mlp(hidden_input="canon")

`canon(set="ABCD")` puts them into the attentions and MLPs of its block; alone it stands for
["attention", "mlp"] with them. Without `set` it is the mixer itself, a sublayer or nested.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.sequence.convolution import Convolution, check_kernel, conv_cost, convolve, without_padding
from twoaxis.sequence.mixer import Between, Mixer, Place, SequenceConfig
from twoaxis.sequence.preset import block_cost, refuse_as_core
from twoaxis.tape import Array, Tape
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape

POINTS = {
    "A": ("attention", "input"),
    "B": ("attention", "qkv"),
    "C": ("mlp", "input"),
    "D": ("mlp", "hidden_input"),
}


@spec.register("sequence", "canon")
class Canon(Mixer):
    """A causal depthwise convolution without bias that is added to its input."""

    equation = "y_t = u_t + sum_j w_j * u_{t-j}"
    source = "arXiv 2512.17351"

    class Config(SequenceConfig):
        """set: the points of a block, any of A, B, C, D. kernel: taps, the current token's included. residual: add the
        input. start: "zero" sets the taps to 0, with a residual the identity; the authors start at random."""

        set: str | None = None
        kernel: int = 4
        residual: bool = True
        activation: Literal["none", "silu"] = "none"
        start: Literal["normal", "zero"] = "normal"

        def check(self) -> None:
            check_kernel(self.name, self.kernel)
            if self.set is None:
                return
            if not self.set or [p for p in POINTS if p in self.set] != sorted(self.set):
                raise InputError(
                    f"canon(set={self.set!r}): allowed is any of the points A, B, C, D once, such as 'ABCD'"
                )
            object.__setattr__(self, "set", "".join(sorted(self.set)))

        def over(self, others: list[SequenceConfig]) -> list[SequenceConfig] | None:
            if self.set is None:
                return None
            block = others or [spec.parse_spec("sequence", name) for name in ("attention", "mlp")]
            for point in self.set:
                block = self._at(point, block)
            return block

        def _at(self, point: str, block: list[SequenceConfig]) -> list[SequenceConfig]:
            host, place = POINTS[point]
            mixer = dataclasses.replace(self, set=None).spec()
            if all(core.name != host for core in block):
                raise InputError(f"{self.spec()}: point {point} needs an {host!r} in the block; add one")
            for core in block:
                if core.name == host and getattr(core, place) is not None:
                    raise InputError(
                        f"{self.spec()}: {core.spec()} has a mixer at point {point}; leave one out"
                    )
            return [
                dataclasses.replace(core, **{place: mixer}) if core.name == host else core for core in block
            ]

        def halo_in(self, block: int = 0) -> int | None:
            return self.kernel - 1 if self.set is None else None

        def coordinates(self) -> Coordinates:
            return Coordinates(
                source="tokens",
                weights="static",
                sharing="per block and channel",
                short_swa="no: weights by distance, not by content",
            )

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            made = self.over([])
            return (
                conv_cost(shape, shape.layout.d_model, self.kernel)
                if made is None
                else block_cost(made, shape)
            )

        def trace(self, t: Tape, reads: Any, at: Place, between: Between | None = None) -> Array:
            y = convolve(t, reads.x, self.kernel)
            if self.activation == "silu":
                y = t.map("silu", y)
            return t.dropout(t.add(reads.x, y) if self.residual else y, at.layout.dropout)

    def __init__(self, cfg: Any, layout: Layout, block: int, **options: Any) -> None:
        super().__init__(cfg, layout, block, **options)
        refuse_as_core(cfg)
        self.conv = Convolution(layout.d_model, cfg.kernel)
        if cfg.start == "zero":
            nn.init.zeros_(self.conv.weight)

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        u = reads.x.to(self.conv.weight.dtype)
        y = self.conv(u, ctx)
        if self.cfg.activation == "silu":
            y = F.silu(y)
        if self.cfg.residual:
            y = u + y
        return F.dropout(without_padding(y, ctx), self.layout.dropout, self.training)
