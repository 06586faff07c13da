"""Measured times beside counted work, where arithmetic dominates: how much longer twice the size takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

import twoaxis
from twoaxis.model import Decoder, ModelConfig

CLOSE = 0.25  # of a ratio; caches and products' efficiency change with the size


@dataclass(frozen=True)
class Timing:
    """Two sizes of one model: FLOPs of the larger over those of the smaller, and CPU seconds likewise."""

    work: str
    counted: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether the ratios are close; a busy machine may say no."""
        return abs(self.measured / self.counted - 1) <= CLOSE


PAIRS = (  # (what grows, sublayers, (tokens, width) of the smaller, of the larger)
    ("mlp, twice the width", ["mlp"], (256, 256), (256, 512)),
    ("attention, twice the tokens", ["attention"], (512, 128), (1024, 128)),
    ("short_swa(window=64), twice the tokens", ["short_swa(window=64)"], (1024, 128), (2048, 128)),
)


def timings(rounds: int = 5, shrink: int = 1) -> list[Timing]:
    """Forward passes of both sizes in turn, one thread, medians of CPU time. shrink: divides all sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_timing(work, cores, small, large, rounds, shrink) for work, cores, small, large in PAIRS]
    finally:
        torch.set_num_threads(before)


def _timing(
    work: str, cores: list[str], small: tuple[int, int], large: tuple[int, int], rounds: int, shrink: int
) -> Timing:
    flops, passes = [], []
    for tokens, width in ((t // shrink, d // shrink) for t, d in (small, large)):
        cfg = ModelConfig(vocab_size=8, d_model=width, n_heads=2, n_blocks=2, sequence=list(cores))
        flops.append(twoaxis.cost(cfg, 1, tokens).flops_forward)
        passes.append(_pass(cfg, tokens))
    ratios = []
    for _ in range(rounds + 1):  # the first is a warm-up
        seconds = [_seconds(run) for run in passes]
        ratios.append(seconds[1] / max(seconds[0], 1e-9))
    return Timing(work, flops[1] / flops[0], median(ratios[1:]))


def _pass(cfg: ModelConfig, tokens: int) -> Callable[[], object]:
    with torch.random.fork_rng(devices=[]):
        model = Decoder(cfg)
    row = torch.zeros(1, tokens, dtype=torch.int64)

    def run() -> object:
        with torch.no_grad():
            return model(row)

    return run


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start
