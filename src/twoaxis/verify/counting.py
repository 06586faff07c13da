"""FLOPs of a real training step and of a decoding step by torch's counter, with our operators' formulas registered.

The counter sees matrix products. An operator of ours runs as many small kernels, so it counts by its formula,
and what the counter saw inside it is taken out. Attention runs on its reference path, as dense products; what
these compute for pairs that the window hides is taken out too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import twoaxis.sequence.attention
from twoaxis import ops
from twoaxis.depth import ddl, ddl_compress, value_residual
from twoaxis.model import Decoder
from twoaxis.ops import reference
from twoaxis.sequence import SoftmaxAttention

Formula = Callable[..., int]  # of the operator's own arguments and its result


def _mixed(sources: Any, weights: Any, out: Tensor) -> int:
    return 2 * sum(x.numel() for x in sources)


def _mixed_by_token(sources: Any, weights: Tensor, out: Any) -> int:
    return 2 * weights.shape[-2] * sum(x.numel() for x in sources)


def _mixed_heads(sources: Any, weight: Tensor, widths: Any, out: Any) -> int:
    return 2 * len(weight) * sum(x.numel() for x in sources)


def _gated(sources: Any, weights: Tensor, gate: Tensor, out: Any, **options: Any) -> int:
    return 6 * len(gate) * sum(x.numel() for x in sources)


def _read(query: Tensor, sources: Any, out: Any, **options: Any) -> int:
    """Scores, key norms, and the mix unless only the weights are wanted."""
    passes = 1 + (options["key_norm_eps"] is not None) + (not options.get("return_weights", False))
    return 2 * passes * sum(x.numel() for x in sources)


def _convolved(x: Tensor, weight: Tensor, out: Tensor, **options: Any) -> int:
    return 2 * weight.shape[-1] * out.numel()


OPERATORS: dict[Any, Formula] = {
    ops.mix: _mixed,
    ops.token_mix: _mixed_by_token,
    ops.head_mix: _mixed_heads,
    ops.gated_mix: _gated,
    ops.depth_read: _read,
    ops.delta_rewrite: lambda state, *rest: 4 * state.numel(),
    ops.depthwise_causal_conv: _convolved,
    ddl._write_only: lambda state, *rest: 2 * state.numel(),
}
MODULES: dict[type, Formula] = {
    value_residual.FixedMix: lambda self, first, own, *rest: 4 * own.numel(),
    value_residual.GatedMix: lambda self, first, own, *rest: 4 * own.numel(),
    **{kind: lambda self, X, *rest: 2 * X.numel() for kind in ddl_compress.KINDS.values()},
}
FAST = [  # whose backward passes run products of their own
    sys.modules[f"twoaxis.ops.{name}"].__dict__[cls]
    for name, cls in (
        ("mix", "_Mix"),
        ("token_mix", "_TokenMix"),
        ("head_mix", "_HeadMix"),
        ("gated_mix", "_GatedMix"),
        ("depth_read", "_DepthRead"),
        ("pulled", "_Gather"),
        ("known_read", "_KnownRead"),
        ("delta_rewrite", "_Rewrite"),
    )
]


@dataclass
class Flops:
    """Of a forward and a backward pass. again: the backward pass runs, in which a network may run once more; seen:
    what the counter saw of that. muted: what it saw and should not have."""

    forward: int = 0
    backward: int = 0
    again: bool = False
    seen: int = 0
    muted: int = 0


def counted_flops(model: Decoder, tokens: Tensor) -> Flops:
    """FLOPs of one training step on tokens (B, T), by the counter and the formulas."""
    found = Flops()
    with (
        FlopCounterMode(display=False) as counter,
        _registered(counter, found),
        _watched(model, counter, found),
    ):
        loss = model.loss(tokens, tokens)
        forward, found.again = counter.get_total_flops(), True
        loss.backward()
        backward = counter.get_total_flops() - forward
    masked = sum(_hidden(part, *tokens.shape) for part in model.modules())
    runs = 3 if model.recomputes else 2
    return Flops(found.forward + forward - masked, found.backward + backward - runs * masked)


def counted_step(model: Decoder, tokens: Tensor) -> int:
    """FLOPs of decoding the last of tokens (B, T) from a cache of those before, by the counter and the formulas.

    Gradients are on, so that operators run as such and not as the few-token kernels. The dense products of attention
    are replaced by those of the pairs that the last query sees.
    """
    batch_size, seq_len = tokens.shape
    found, cache, dense = Flops(), model.new_cache(batch_size, seq_len), 0
    with torch.no_grad():
        model(tokens[:, :-1], cache=cache)

    def attention(*args: Any, **options: Any) -> Any:
        nonlocal dense
        before = counter.get_total_flops()
        out = reference.local_attention(*args, **options)
        dense += counter.get_total_flops() - before
        return out

    with FlopCounterMode(display=False) as counter, _registered(counter, found):
        with patch.object(twoaxis.sequence.attention, "local_attention", attention):
            model(tokens[:, -1:], cache=cache)
        total = counter.get_total_flops()
    seen = sum(_seen(part, seq_len) - _seen(part, seq_len - 1) for part in model.modules())
    return found.forward + total - dense + batch_size * seen


def _seen(part: Any, seq_len: int) -> int:
    """FLOPs of attention over the visible pairs of one row."""
    if not isinstance(part, SoftmaxAttention) or not part.token_read:
        return 0
    return 2 * part.n_heads * (part.width + part.value_width) * part.cfg.pairs(seq_len, part.block)


def _hidden(part: Any, batch_size: int, seq_len: int) -> int:
    """What dense attention computes for hidden pairs, and for the zeros that narrow heads are padded with."""
    if not isinstance(part, SoftmaxAttention) or not part.token_read:
        return 0
    dense = 4 * part.n_heads * max(part.width, part.value_width) * seq_len**2
    return batch_size * (dense - _seen(part, seq_len))


@contextmanager
def _registered(counter: FlopCounterMode, found: Flops) -> Iterator[None]:
    """Count our operators by their formulas while this lasts."""
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(twoaxis.sequence.attention, "local_attention", reference.local_attention)
        )
        for operator, formula in OPERATORS.items():
            counting = _counting(operator, formula, counter, found, whole=True)
            for module in [m for name, m in sys.modules.items() if name.startswith("twoaxis.")]:
                for name in [n for n, value in vars(module).items() if value is operator]:
                    stack.enter_context(patch.object(module, name, counting))
        for kind, formula in MODULES.items():
            counting = _counting(vars(kind)["forward"], formula, counter, found, whole=False)
            stack.enter_context(patch.object(kind, "forward", counting))
        for function in FAST:
            quiet = staticmethod(_muted(function.backward, counter, found))
            stack.enter_context(patch.object(function, "backward", quiet))
        again = _muted(ops.rebuilt.Place.state, counter, found)  # states that backward passes make again
        stack.enter_context(patch.object(ops.rebuilt.Place, "state", again))
        yield


@contextmanager
def _watched(model: Decoder, counter: FlopCounterMode, found: Flops) -> Iterator[None]:
    """Note what the counter sees of a network that runs again."""
    run = model._through

    def through(*args: Any) -> Any:
        before = counter.get_total_flops()
        try:
            return run(*args)
        finally:  # it ends early, by an exception, once all is there that was not kept
            found.seen += (counter.get_total_flops() - before) * found.again

    with patch.object(model, "_through", through):
        yield


def _counting(
    run: Any, formula: Formula, counter: FlopCounterMode, found: Flops, whole: bool
) -> Callable[..., Any]:
    """The operator, counted; `whole`: what the counter sees inside is part of the formula."""

    def counting(*args: Any, **options: Any) -> Any:
        before, out = counter.get_total_flops(), None
        try:
            out = run(*args, **options)
        finally:
            if found.again:
                seen = counter.get_total_flops() - before if whole else 0
                found.backward += formula(*args, out, **options) - seen
        if found.again:
            return out
        flops = formula(*args, out, **options)
        found.forward += flops - (counter.get_total_flops() - before if whole else 0)
        weights = args[1] if formula is _mixed else None
        fixed = isinstance(weights, Tensor) and not weights.requires_grad
        found.backward += flops if fixed else 2 * flops
        return out

    return counting


def _muted(run: Callable[..., Any], counter: FlopCounterMode, found: Flops) -> Callable[..., Any]:
    """A part of a backward pass, without what the counter sees in it."""

    def quiet(*args: Any) -> Any:
        before, aside = counter.get_total_flops(), found.seen + found.muted
        out = run(*args)  # which may make the network run again, or states, muted themselves
        silent = counter.get_total_flops() - before - (found.seen + found.muted - aside)
        found.backward, found.muted = found.backward - silent, found.muted + silent
        return out

    return quiet
