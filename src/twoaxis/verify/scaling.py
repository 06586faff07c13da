"""The duality paper's complexity table as exponents, fitted to counted score and value work.

| read                        | paper          | counted for one head, B = 1: 4 d for each pair               |
|-----------------------------|----------------|---------------------------------------------------------------|
| ShortSWA, one block         | O(T w d)       | visible pairs of `short_swa`                                   |
| full attention, one block   | O(T^2 d)       | visible pairs of `attention`                                   |
| depth read, window K        | O(T K L d)     | states seen by `depth_window(window_blocks=K)` over L blocks   |
| depth read, full memory     | O(T L^2 d)     | states seen by `depth_window`                                  |

An exponent is the slope of log(work) from half a size to the size, taken where edge terms (the first w tokens,
the first K layers) are under 1 %, so that it can differ from the paper's by log2(1.01) at most; the
projections, which that table leaves out, are beside it with their own exponent in d.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from twoaxis.cost import traced
from twoaxis.model import ModelConfig

TOLERANCE = 0.0145  # of an exponent: log2(1.01), what edge terms of 1 % would change
SIZES = {"T": 8192, "w": 16, "K": 4, "L": 256, "d": 64}


@dataclass(frozen=True)
class Exponent:
    """How work grows with one size, and what the paper says."""

    work: str
    size: str
    counted: float
    paper: float

    @property
    def passed(self) -> bool:
        """Whether the two agree."""
        return abs(self.counted - self.paper) <= TOLERANCE


def score_work(cfg: ModelConfig, seq_len: int, kernels: tuple[str, ...]) -> int:
    """FLOPs of the kernels of these names in one forward pass of a row."""
    tape = traced(cfg, 1, seq_len)
    assert tape is not None
    return sum(kernel.flops for kernel in tape.kernels if kernel.name in kernels)


SCORES = ("sdpa", "blocked", "depth_read")


def exponents() -> list[Exponent]:
    """Every exponent of the table, of two whole blocks in T, and of projections in d."""
    found = []
    for work, count, paper in (
        ("short_swa: scores and values", _short_swa, {"T": 1, "w": 1, "d": 1}),
        ("full attention: scores and values", _attention, {"T": 2, "d": 1}),
        ("depth read, window K: scores and values", _window, {"T": 1, "K": 1, "L": 1, "d": 1}),
        ("depth read, full memory: scores and values", _full, {"T": 1, "L": 2, "d": 1}),
        ("short_swa: its projections", _projections, {"T": 1, "w": 0, "d": 2}),
        ("depth read: its projections", _depth_projections, {"T": 1, "K": 0, "L": 1, "d": 2}),
        ("[short_swa, attention, mlp]: scores and values", _hybrid, {"T": 2}),
        ("[short_swa, mlp]: scores and values", _short_swa, {"T": 1}),
    ):
        found += [Exponent(work, size, _slope(count, size), float(power)) for size, power in paper.items()]
    return found


def _slope(count: Callable[[dict[str, int]], int], size: str) -> float:
    low, high = (count(SIZES | {size: SIZES[size] // part}) for part in (2, 1))
    return math.log2(high / low)


def _model(s: dict[str, int], sequence: list[str], depth: str = "additive", n_blocks: int = 1) -> ModelConfig:
    return ModelConfig(
        vocab_size=2, d_model=s["d"], n_heads=1, n_blocks=n_blocks, depth=depth, sequence=sequence
    )


def _short_swa(s: dict[str, int]) -> int:
    return score_work(_model(s, [f"short_swa(window={s['w']})", "mlp"]), s["T"], SCORES)


def _attention(s: dict[str, int]) -> int:
    return score_work(_model(s, ["attention", "mlp"]), s["T"], SCORES)


def _hybrid(s: dict[str, int]) -> int:
    return score_work(_model(s, [f"short_swa(window={s['w']})", "attention", "mlp"]), s["T"], SCORES)


def _depth(s: dict[str, int], spec: str, kernels: tuple[str, ...]) -> int:
    return score_work(_model(s, ["mlp(hidden=1)"], spec, s["L"]), s["T"], kernels)


def _window(s: dict[str, int]) -> int:
    return _depth(s, f"depth_window(window_blocks={s['K']})", SCORES)


def _full(s: dict[str, int]) -> int:
    return _depth(s, "depth_window", SCORES)


def _projections(s: dict[str, int]) -> int:
    cfg = _model(s, [f"short_swa(window={s['w']})"])
    tape = traced(cfg, 1, s["T"])
    assert tape is not None
    return sum(k.flops for k in tape.kernels if k.name == "linear" and k.part == "short_swa")


def _depth_projections(s: dict[str, int]) -> int:
    tape = traced(_model(s, ["mlp(hidden=1)"], f"depth_window(window_blocks={s['K']})", s["L"]), 1, s["T"])
    assert tape is not None
    return sum(k.flops for k in tape.kernels if k.name == "linear" and k.part == "depth")
