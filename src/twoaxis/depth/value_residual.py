"""Value residual (ResFormer): every attention's values are mixed with those of the first.

V'_n = l1_n V_1 + l2_n V_n,  n > 1,   y = attention(q_n, k_n, V'_n)                       (arXiv 2410.17897)

 norm(x) ── W_v ─ V_n ── + ── V'_n ─┐
 V_1 ────────────────────┘          ├─ attention ── + x         V_1: values of the network's first attention
 norm(x) ── W_q, W_k ─ q, k ────────┘

Values carry no rotation; the cache keeps V'. The form without W_v is `svformer`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, Stream
from twoaxis.depth.first_value import FirstValue, FirstValueConfig, FirstValueStream, FirstValueTrace
from twoaxis.errors import InputError
from twoaxis.ops import mix, traced
from twoaxis.ops.precision import compute_dtype, full_precision
from twoaxis.tape import Array
from twoaxis.types import Cost, Layout, Shape, StandardStart

FIXED = {"identity": (0.5, 0.5), "constant": (2.0, 1.0), "sparse": (5.0, 1.0)}  # l1, l2


@spec.register("depth", "value_residual")
class ValueResidual(FirstValue):
    """read: norm(x); inside attention V becomes l1 V_1 + l2 V; write: x + y. No weight of it is decayed."""

    equation = "y = attention(q_n, k_n, l1_n V_1 + l2_n V_n)"
    source = "arXiv 2410.17897"

    class Config(FirstValueConfig):
        """form: of (l1, l2). "identity" is (1/2, 1/2), the only one in the authors' code; "constant" (2, 1);
        "sparse" (5, 1) in the last third of the attentions alone; "learnable" two scalars per attention;
        "learnable_plus" l1_n = s softmax(lambda)_n over the n that mix, and l2_n; "gated" per token and head
        (1 - m, m), m = sigmoid(W norm(x) + c). start, of the learnable forms: "paper" is (1/2, 1/2) and s
        the number of those n, "standard" (0, 1) and s = 0, the standard Transformer.
        """

        form: Literal["identity", "constant", "sparse", "learnable", "learnable_plus", "gated"] = "identity"
        start: Literal["paper", "standard"] = "paper"

        def check(self) -> None:
            if self.start == "standard" and not self.form.startswith("learnable"):
                raise InputError(
                    f"value_residual(form={self.form!r}, start='standard'): this form has no such start; use "
                    "form='learnable' or 'learnable_plus'"
                )

        def readers(self, layout: Layout) -> list[int]:
            later = super().readers(layout)
            count = len(later) + 1
            return [n for n in later if 3 * n >= 2 * count] if self.form == "sparse" else later

        def weights(self) -> str:
            return "fixed" if self.form in FIXED else "gated" if self.form == "gated" else "static"

        def standard_start(self) -> StandardStart:
            return "exact" if self.start == "standard" else "no"

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            """4 flops per value and token of each attention that mixes, and 2 d per gate; twice backward."""
            layout, readers = shape.layout, len(self.readers(shape.layout))
            heads, width = self.heads(layout)
            gates = heads * (layout.d_model + 1)
            each = {"learnable": 2, "learnable_plus": 2 if readers > 1 else 1, "gated": gates}.get(
                self.form, 0
            )
            shared = 1 if self.form == "learnable_plus" and readers else 0
            flops = readers * heads * (4 * width + (2 * layout.d_model if self.form == "gated" else 0))
            return self.network_cost(shape, readers * each + shared, flops)

    def __init__(
        self, cfg: Any, layout: Layout, block: int, index: int, shared: SharedWeights | None = None
    ) -> None:
        super().__init__(cfg, layout, block, index)
        readers = cfg.readers(layout)
        self.in_order = tuple(
            _value_mix(cfg, layout, readers.index(n), shared) if n in readers else None for n in self.numbers
        )
        named = zip(map(str, self.numbers), self.in_order, strict=True)
        self.mixes = nn.ModuleDict({n: made for n, made in named if made is not None})

    def values(self, n: int, first: Tensor, own: Tensor | None, x: Tensor) -> Tensor:
        how = self.in_order[n]
        assert own is not None
        assert how is not None
        own = own.to(compute_dtype(first))
        mixed: Tensor = how(first.to(own.dtype), own, x)
        return mixed

    @classmethod
    def network(cls, cfg: Any, layout: Layout) -> tuple[Stream, list[list[Connection]]]:
        count = len(cfg.readers(layout))
        plus = cfg.form == "learnable_plus" and count
        shared = SharedWeights(count, 0.0 if cfg.start == "standard" else float(count)) if plus else None
        blocks = cls.every(cfg, layout, shared)
        return FirstValueStream(cfg, layout, shared), blocks


def _value_mix(cfg: Any, layout: Layout, place: int, shared: SharedWeights | None) -> nn.Module:
    """How one attention mixes; `place` counts the attentions that do."""
    if cfg.form in FIXED:
        return FixedMix(*FIXED[cfg.form])
    if cfg.form == "gated":
        return GatedMix(layout, cfg.heads(layout)[0])
    if cfg.form == "learnable":
        return ScalarMix(0.0, 1.0) if cfg.start == "standard" else ScalarMix(0.5, 0.5)
    if shared is None:
        raise InputError("value_residual(form='learnable_plus') shares weights; use ValueResidual.network")
    return PlusMix(shared, place, 1.0 if cfg.start == "standard" else 0.5)


class FixedMix(nn.Module):
    """l1 V_1 + l2 V with fixed numbers."""

    def __init__(self, first: float, own: float) -> None:
        super().__init__()
        self.weights = (first, own)

    def forward(self, first: Tensor, own: Tensor, x: Tensor) -> Tensor:
        return self.weights[0] * first + self.weights[1] * own


class ScalarMix(nn.Module):
    """l1 V_1 + l2 V with weights (l1, l2) that are learned."""

    def __init__(self, first: float, own: float) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([first, own]))

    def forward(self, first: Tensor, own: Tensor, x: Tensor) -> Tensor:
        return mix((first, own), self.weights)


class SharedWeights(nn.Module):
    """l1 of all attentions that mix: s softmax(lambda), s from `scale` (their number: 1 each), lambda from 0."""

    def __init__(self, count: int, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.logits = nn.Parameter(torch.zeros(count)) if count > 1 else None

    def forward(self, place: Tensor) -> Tensor:
        """l1, a scalar, of the attention in this place (1,)."""
        if self.logits is None:
            return self.scale
        share: Tensor = self.logits.softmax(0).index_select(0, place).squeeze(0)
        return self.scale * share


class PlusMix(nn.Module):
    """l1 V_1 + l2 V with l1 shared out between the attentions and l2 of its own, from `own`."""

    def __init__(self, shared: SharedWeights, place: int, own: float) -> None:
        super().__init__()
        self.__dict__["shared"] = shared  # the stream registers it, once
        # a tensor: with a number of its own torch would compile every block anew
        self.register_buffer("place", torch.tensor([place]), persistent=False)
        self.own = nn.Parameter(torch.tensor(own))

    def forward(self, first: Tensor, own: Tensor, x: Tensor) -> Tensor:
        shared: SharedWeights = self.__dict__["shared"]
        return mix((first, own), (shared(self.place), self.own))


class GatedMix(nn.Module):
    """(1 - m) V_1 + m V with m = sigmoid(W x + c) per token and head; W from N(0, init_std^2), c from 0."""

    def __init__(self, layout: Layout, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, layout.d_model) * layout.init_std)
        self.bias = nn.Parameter(torch.zeros(heads))

    def forward(self, first: Tensor, own: Tensor, x: Tensor) -> Tensor:
        with full_precision(x):
            m = F.linear(x.to(own.dtype), self.weight.to(own.dtype), self.bias.to(own.dtype)).sigmoid()
            return torch.lerp(first, own, m[..., None])


spec.alias("depth", "resformer", "value_residual")


class ValueTrace(FirstValueTrace):
    """The same in sizes alone."""

    def values(self, first: Array, own: Array | None, x: Array) -> Array:
        assert own is not None
        t, form = self.t, self.cfg.form
        if form in FIXED:
            parts = [t.map("scale", v, keep="nothing") for v in (first, own)]
            return t.run("add", parts, t.like(own), flops=4 * own.numbers)
        if form == "gated":
            heads = self.cfg.heads(self.layout)[0]
            m = t.map("sigmoid", t.linear(t.cast(x, t.wide), heads, bias=True), keep="output")
            return t.run("lerp", (first, own, m), t.like(own), keep=(first, own, m), flops=4 * own.numbers)
        count = len(self.cfg.readers(self.layout))
        if form == "learnable" or count == 1:
            return traced.mix(t, (first, own))
        shares = t.table(count)
        t.run("softmax", (t.weight(count),), shares, keep=(shares,))
        share = t.run("select", (shares,), t.table(1), keep=(t.table(1, 8, constant=True),))
        share = t.run("mul", (share,), t.table(1), keep=(share,))
        return traced.mix(t, (first, own), [share])


ValueResidual.Config.trace = ValueTrace
