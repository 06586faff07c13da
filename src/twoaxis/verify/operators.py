"""The operators that are checked by one call: their inputs, how they are called, and which kernel is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis import ops
from twoaxis.ops import reference
from twoaxis.ops.precision import compute_dtype

Shape = tuple[int, ...]
TOKENS = (3, 43)
SOURCE = (*TOKENS, 33)
STREAMS = (*TOKENS, 4, 33)


class Operator(NamedTuple):
    """An operator of `ops` whose equation in `ops.reference` has the same name and signature."""

    name: str
    shapes: list[Shape]
    call: Callable[..., Tensor]  # of the operator or its equation, on inputs of these shapes
    kernel: str
    roundings: tuple[int, int] = (1, 1)  # to bfloat16, in a row: by torch's own operations, by a kernel

    def inputs(self) -> list[Tensor]:
        """Normal numbers of a fixed seed in float64."""
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]

    def fast(self, *inputs: Tensor) -> Tensor:
        """By the operator, whichever backend it takes."""
        return self.call(getattr(ops, self.name), *inputs)

    def exact(self, *inputs: Tensor) -> Tensor:
        """By the equation."""
        return self.call(getattr(reference, self.name), *inputs)


def operators() -> list[Operator]:
    """Sizes are odd."""
    x, read = SOURCE, (*TOKENS, 4)
    return [
        Operator("depth_read", [(33,), (33,), (33,), *[x] * 7], _depth_read, "depth_read"),
        Operator("delta_rewrite", [(*x, 4), x, read, TOKENS], lambda f, *xs: f(*xs, 1e-5), "delta_rewrite"),
        Operator(
            "stream_read",
            [STREAMS, read, (33,)],
            lambda f, x, w, gain: f(x, w, gain=gain, eps=1e-6),
            "streams",
        ),
        Operator(
            "stream_scores", [STREAMS, (33, 6)], lambda f, x, matrix: f(x, matrix, 1e-6), "stream_scores"
        ),
        Operator("stream_write", [STREAMS, (*TOKENS, 4, 4), read, x], lambda f, *xs: f(*xs), "streams"),
        Operator("hyper_gates", [(*TOKENS, 4, 6), (4, 6), (1,), (1,)], _hyper_gates, "stream_gates"),
        Operator("mhc_gates", [(*TOKENS, 24), (3,), (24,)], _mhc_gates, "stream_gates"),
        Operator(
            "hyper_pass",
            [STREAMS, (*TOKENS, 4, 4), read, x, (33, 6), (4, 6), (1,), (1,), (33,)],
            _pass,
            "stream_pass",
            roundings=(4, 4),  # of the streams, of the read and of the gradients of both states
        ),
        Operator(
            "mhc_pass",
            [STREAMS, (*TOKENS, 4, 4), read, x, (132, 24), (3,), (24,), (33,)],
            _pass,
            "stream_pass",
            roundings=(4, 4),
        ),
        Operator("mix", [(7,), *[x] * 7], lambda f, w, *sources: f(sources, w), "mix"),
        Operator(
            "token_mix",
            [(*TOKENS, 3, 7), *[x] * 7],
            lambda f, w, *sources: torch.stack(f(sources, w)),
            "token_mix",
        ),
        Operator(
            "head_mix",
            [(3, 14), *[(*TOKENS, 11, 2)] * 7],
            lambda f, w, *sources: torch.cat(f(sources, w, (6, 5)), -1),
            "token_mix",
        ),
        Operator(
            "depthwise_causal_conv",
            [x, (33, 4), (3, 3, 33)],
            lambda f, x, w, past: f(x, w, history=past),
            "causal_conv",
        ),
        Operator("rms_norm", [x, (33,)], lambda f, x, gain: f(x, gain, 1e-6), "rms_norm"),
        Operator(
            "add_rms_norm",
            [x, x, (33,)],
            lambda f, x, y, gain: torch.cat(f(x, y, gain, 1e-6), -1),
            "rms_norm",
            roundings=(2, 2),  # the norm is of the rounded sum
        ),
        Operator("swiglu", [(*TOKENS, 66)], lambda f, x: f(x), "swiglu", roundings=(2, 1)),
        Operator("rotate", [(*TOKENS, 2, 33)], _rotate, "rotate"),
        Operator("token_loss", [x], _token_loss, "token_loss"),
        Operator(
            "gated_mix",
            [(3, 7, 33), (3, 33), *[x] * 7],
            lambda f, b, w, *sources: torch.cat(f(sources, b, w, norm_eps=1e-6), -1),
            "gated_mix",
        ),
    ]


def _depth_read(
    f: Callable[..., Tensor], query: Tensor, key: Tensor, out: Tensor, *sources: Tensor
) -> Tensor:
    return f(query, sources, key_gain=key, output_gain=out, output_eps=1e-6)


def _hyper_gates(f: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    return torch.cat([x.flatten(2) for x in f(*inputs)], -1)


def _mhc_gates(f: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    return torch.cat([x.flatten(2) for x in f(*inputs, 4)], -1)


def _pass(f: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
    return torch.cat([x.flatten(2) for x in f(*inputs[:-1], gain=inputs[-1])], -1)


def _rotate(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    angles = torch.arange(43 * 15).view(43, 1, 15) / 7  # of 30 of 33 features
    return f(x, *(g.to(compute_dtype(x)) for g in (angles.cos(), angles.sin())))


def _token_loss(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    targets = torch.randint(33, TOKENS, generator=torch.Generator().manual_seed(0))
    return f(x, targets) / targets.numel()
