"""A table of five schemes that circulates without a source, each cell against what is counted.

Compute is the mixing of one layer (for the standard stream its additions), memory what is live: of the depth
schemes the state at a block boundary for each token, of attention over a window the cache of one layer.
Orders are exponents, fitted between half a size and the size. Stars for parallelism are taken as an order: more
stars, fewer bytes at a pipeline boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import twoaxis
from twoaxis.cost import traced
from twoaxis.model import ModelConfig

TOLERANCE = 0.05  # of an exponent at these sizes, where edge terms are up to 3 %
SIZES = {"T": 256, "L": 128, "K": 4, "w": 16, "d": 64}
Orders = dict[str, int]  # size -> exponent; sizes that are left out have 0


@dataclass(frozen=True)
class Scheme:
    """One row: its model, the kernels that mix, and what is said of it."""

    name: str
    depth: str
    sequence: str
    kernels: tuple[str, ...]
    compute: Orders
    memory: Orders
    stars: int

    def model(self, s: dict[str, int]) -> ModelConfig:
        """At some sizes."""
        return ModelConfig(
            vocab_size=2,
            d_model=s["d"],
            n_heads=1,
            n_blocks=s["L"],
            depth=self.depth.format(**s),
            sequence=[self.sequence.format(**s)],
        )


@dataclass(frozen=True)
class Cell:
    """What is said, what is counted, and whether they agree."""

    scheme: str
    column: str
    said: str
    counted: str
    right: bool


def _linear(sizes: str) -> Orders:
    return dict.fromkeys(sizes, 1)


LIGHT = "mlp(hidden=1)"
SCHEMES = [
    Scheme("standard", "additive", LIGHT, ("add",), _linear("Td"), {}, 5),
    Scheme("ELC-BERT", "elc_bert", LIGHT, ("static mix",), _linear("Td"), _linear("Ld"), 4),
    Scheme("DenseFormer", "denseformer", LIGHT, ("static mix",), _linear("TLd"), _linear("Ld"), 3),
    Scheme(
        "depth attention",
        "depth_window(window_blocks={K})",
        LIGHT,
        ("depth_read",),
        _linear("TKd"),
        _linear("Ld"),
        2,
    ),
    Scheme(
        "sequence SWA", "additive", "short_swa(window={w})", ("blocked",), _linear("Twd"), _linear("wd"), 5
    ),
]


def cells() -> list[Cell]:
    """Every cell of the table."""
    sent = {scheme.name: boundary(scheme, SIZES) for scheme in SCHEMES}
    found = []
    for scheme in SCHEMES:
        for column, said, count in (
            ("compute of a layer", scheme.compute, compute),
            ("memory", scheme.memory, memory),
        ):
            counted = orders(scheme, count)
            found.append(Cell(scheme.name, column, spell(said), spell(counted), _same(said, counted)))
        agree = all(
            (scheme.stars - other.stars) * (sent[scheme.name] - sent[other.name]) <= 0 for other in SCHEMES
        )
        times = sent[scheme.name] / sent["standard"]
        found.append(
            Cell(
                scheme.name,
                "parallelism",
                f"{scheme.stars} stars",
                f"{times:g} x the standard boundary (L={SIZES['L']}, K={SIZES['K']})",
                agree,
            )
        )
    return found


def compute(scheme: Scheme, s: dict[str, int]) -> float:
    """Mixing of an average layer: FLOPs, or additions of the standard stream."""
    tape = traced(scheme.model(s), 1, s["T"])
    assert tape is not None
    mixing = [kernel for kernel in tape.kernels if kernel.name in scheme.kernels]
    return sum(kernel.flops or kernel.outputs[0].numbers for kernel in mixing) / s["L"]


def memory(scheme: Scheme, s: dict[str, int]) -> float:
    """Live bytes: of the depth axis for a token, of the sequence axis for a layer."""
    cost = twoaxis.cost(scheme.model(s), 1, s["T"])
    if cost.decode_state_bytes:
        return cost.decode_state_bytes / s["L"]
    return cost.boundary_bytes["window"] / s["T"]


def boundary(scheme: Scheme, s: dict[str, int]) -> int:
    """Bytes at the largest boundary."""
    return twoaxis.cost(scheme.model(s), 1, s["T"]).boundary_bytes["window"]


def orders(scheme: Scheme, count: Callable[[Scheme, dict[str, int]], float]) -> dict[str, float]:
    """The exponent of every size."""
    whole = count(scheme, SIZES)
    return {
        size: math.log2(whole / count(scheme, SIZES | {size: value // 2})) for size, value in SIZES.items()
    }


def spell(found: Orders | dict[str, float]) -> str:
    """O(..) of exponents."""
    parts = [(size, round(power, 2)) for size, power in found.items() if abs(power) > TOLERANCE]
    return "O(" + (" ".join(s if p == 1 else f"{s}^{p:g}" for s, p in parts) or "1") + ")"


def _same(said: Orders, counted: dict[str, float]) -> bool:
    """Of the sizes in the claim, and L where it leaves that out; a stream of d numbers is O(1) states."""
    sizes = set(counted) - ({"d"} if not said else set())
    return all(abs(counted[size] - said.get(size, 0)) <= TOLERANCE for size in sizes)
