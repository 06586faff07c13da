"""How far back over depth a model reads: narrowed at run time, and what a model has learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.errors import InputError
from twoaxis.model.decoder import Decoder
from twoaxis.model.modes import evaluating
from twoaxis.types import DepthRule


@contextmanager
def depth_windows(model: Decoder, rule: DepthRule) -> Iterator[None]:
    """Within this block of code the model reads no further back over depth than the rule says, without training.

    rule: a number of block states, the current one included; or a function of (block index, positions of the
    tokens, (T,) or (B, T)), called at each read, that gives such a number or one for each token (int64, the
    shape of the positions). A constant is exactly a fixed window of that size. A rule by position gives the
    same logits however tokens are fed; one that counts calls or looks at the clock need not.

        with depth_windows(model, lambda block, positions: 4 - 3 * (positions > 6000).long()): ...

    InputError for a depth method without such a window. Rules below 1, or above the window that the model was
    built with, are refused when the model reads.
    """
    depth = model.cfg.depth_config()
    if not depth.follows_rule:
        able = [name for name, cls in spec.methods("depth").items() if cls.Config.follows_rule]  # type: ignore[attr-defined]
        raise InputError(f"{depth.name} has no depth window to narrow; methods that have: {', '.join(able)}")
    before, model.depth_window = model.depth_window, rule
    try:
        yield
    finally:
        model.depth_window = before


@torch.no_grad()
def expected_depth(model: Decoder, tokens: Tensor, *, segments: Tensor | None = None) -> list[float | None]:
    """How many block states, the current one included, each block reads on average over tokens (B, T).

    None for a block that does not choose. In evaluation mode. Padding, segments of -1, is left out.
    """
    with evaluating(model):
        _, states = model(tokens, segments=segments, return_states=True)
    ctx = model.context(tokens, segments)
    means: list[float | None] = []
    for index, block in enumerate(model.blocks):
        K = block.connections[0].expected_depth(states[f"block.{index}"], ctx)  # type: ignore[union-attr,index]
        if K is not None and segments is not None:
            K = K[segments >= 0]
        means.append(None if K is None else K.mean().item())
    return means
