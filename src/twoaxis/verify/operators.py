"""Operators that need no more than a call to be checked: depth mixing, convolution, and what every model is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.ops.precision import compute_dtype

TOKENS = (3, 43)
KERNELS = {
    "depthwise_causal_conv": "causal_conv",
    "add_rms_norm": "rms_norm",
}  # others are named as the operator
TWICE = ("add_rms_norm", "swiglu")  # torch's own operations round to bfloat16 in between


class Operator(NamedTuple):
    """An operator of `ops` and of `ops.reference`: its inputs in float64, and how either is called on them."""

    name: str
    kernel: str
    inputs: list[Tensor]
    call: Callable[..., Tensor]
    roundings: int


def operators() -> Iterator[Operator]:
    """Sizes are odd, inputs normal numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(33, TOKENS, generator=generator)
    angles = torch.arange(43 * 15).view(43, 1, 15) / 7  # of 30 of 33 features

    def turned(f: Callable[..., Tensor], x: Tensor) -> Tensor:
        return f(x, *(g.to(compute_dtype(x)) for g in (angles.cos(), angles.sin())))

    x = (*TOKENS, 33)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "mix": [(7,), *[x] * 7],
        "depthwise_causal_conv": [x, (33, 4), (3, 3, 33)],
        "rms_norm": [x, (33,)],
        "add_rms_norm": [x, x, (33,)],
        "swiglu": [(*TOKENS, 66)],
        "rotate": [(*TOKENS, 2, 33)],
        "token_loss": [x],
    }
    calls: dict[str, Callable[..., Tensor]] = {
        "mix": lambda f, w, *sources: f(sources, w),
        "depthwise_causal_conv": lambda f, x, w, past: f(x, w, history=past),
        "rms_norm": lambda f, x, gain: f(x, gain, 1e-6),
        "add_rms_norm": lambda f, x, y, gain: torch.cat(f(x, y, gain, 1e-6), -1),
        "swiglu": lambda f, x: f(x),
        "rotate": turned,
        "token_loss": lambda f, x: f(x, targets) / targets.numel(),
    }
    for name, call in calls.items():
        inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes[name]]
        yield Operator(name, KERNELS.get(name, name), inputs, call, 1 + (name in TWICE))
