"""From gates between the two axes that a model has learned to a model whose blocks have one axis each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twoaxis.depth import AxisGate
from twoaxis.errors import InputError
from twoaxis.model.decoder import Decoder
from twoaxis.model.modes import evaluating


@torch.no_grad()
def axis_shares(model: Decoder, tokens: Tensor, *, segments: Tensor | None = None) -> list[float | None]:
    """The mean gate of each block over tokens (B, T), the share of its sequence axis; None without a gate.

    In evaluation mode. Padding, segments of -1, is left out.
    """
    shares: list[float | None] = [None] * len(model.blocks)
    hooks = []
    for index, block in enumerate(model.blocks):

        def note(module: Any, inputs: Any, gates: Tensor, index: int = index) -> None:
            kept = gates if segments is None else gates[segments >= 0]
            shares[index] = kept.mean().item()

        hooks += [m.register_forward_hook(note) for m in block.modules() if isinstance(m, AxisGate)]
    try:
        with evaluating(model):
            model(tokens, segments=segments, last=1)
    finally:
        for hook in hooks:
            hook.remove()
    return shares


def freeze_axes(
    model: Decoder, tokens: Tensor | None = None, *, segments: Tensor | None = None, axes: str | None = None
) -> Decoder:
    """A copy of a `hybrid` model with each gate set for good to the axis that has the larger share over tokens.

    What the other axis needed is gone from the copy: it gives the logits that the model gives with its gates
    at 1 or 0, and computes, keeps and caches only what they use. axes: choose by hand, S or D for each block
    (B leaves it), instead of by tokens. InputError for a model without gates between axes.
    """
    depth = model.cfg.depth_config()
    if axes is not None and set(axes) - set("SDB"):
        raise InputError(f"axes={axes!r}: allowed is S, D, or B to leave it, for each block")
    if axes is None and tokens is None:
        raise InputError("freeze_axes needs tokens to average the gates over, or axes")
    if axes is not None:
        shares: list[float | None] = [{"S": 1.0, "D": 0.0}.get(letter) for letter in axes]
    elif tokens is not None:
        shares = axis_shares(model, tokens, segments=segments)
    frozen = depth.frozen(shares, model.cfg.n_blocks)
    cfg = replace(model.cfg, depth=frozen.spec())
    with torch.random.fork_rng(devices=[]):  # building draws numbers
        copy = Decoder(cfg).to(model.embedding.weight)
    weights = model.state_dict()
    copy.load_state_dict({name: weights[name] for name in copy.state_dict()})
    return copy.train(model.training)
