"""The cost model against the machine: every number it states for a small model, and the same number measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import twoaxis
from twoaxis.cost import boundaries
from twoaxis.depth import named_tensors
from twoaxis.errors import InputError
from twoaxis.model import Decoder, ModelConfig
from twoaxis.ops import visible, visible_pairs
from twoaxis.verify.counting import counted_flops, counted_step
from twoaxis.verify.saved import saved_bytes

B, T = 2, 13
SMALL = {"vocab_size": 11, "d_model": 12, "n_blocks": 3, "n_heads": 2}
BLOCKS = [
    ["attention", "mlp"],
    ["short_swa(window=3)", "attention", "mlp"],
    ["short_swa(window=3, position='bias', sink=True)", "mlp"],
    ["canon(set='ABCD')"],
    ["short_conv(form='lfm2')", "parallel(token_shift, residual(canon))", "mlp(act='gelu')"],
]
HISTORIES = ("int8", "bfloat16", "recompute")


@dataclass(frozen=True)
class Check:
    """One number of one model, from the configuration and measured."""

    model: str
    quantity: str
    stated: int
    measured: int

    @property
    def passed(self) -> bool:
        """Whether they are the same."""
        return self.stated == self.measured


def models() -> Iterator[ModelConfig]:
    """Every depth method that states all its counts, the other block lists on the plain stream, and histories."""
    for depth in [name for name in twoaxis.methods("depth") if name not in untraced()]:
        yield ModelConfig(depth=depth, sequence=list(BLOCKS[0]), **SMALL)  # type: ignore[arg-type]
    for block in BLOCKS[1:]:
        yield ModelConfig(depth="additive", sequence=list(block), **SMALL)  # type: ignore[arg-type]
    for history in HISTORIES:
        yield ModelConfig(depth="attnres", history=history, **SMALL)  # type: ignore[arg-type]


def widest(model: Decoder) -> Decoder:
    """The model itself, its reads as wide as they can be, which is what costs are counted for."""
    for block in model.blocks:
        for connection in block.connections:  # type: ignore[union-attr]
            connection.read_widest()
    return model


def untraced() -> dict[str, str]:
    """The depth methods that state parameters, FLOPs and decode state alone, and why."""
    found = {name: method.Config for name, method in twoaxis.methods("depth").items()}  # type: ignore[attr-defined]
    return {name: config.untraced for name, config in found.items() if config.trace is None}


def checks(cfg: ModelConfig) -> list[Check]:
    """Every number of a model that states them all; InputError for a method without a trace."""
    kept = "" if cfg.history == "full" else f" history={cfg.history}"
    name = f"{cfg.depth} {cfg.sequence}{kept}"
    step = twoaxis.cost(cfg, B, T, phase="decoding")
    cost, generator = twoaxis.cost(cfg, B, T), torch.Generator().manual_seed(0)
    if cost.saved_bytes is None:
        raise InputError(
            f"what {cfg.depth} saves is not known from its options: {cfg.depth_config().untraced}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = widest(Decoder(cfg))
    tokens = torch.randint(cfg.vocab_size, (B, T), generator=generator)
    parameters = list(model.parameters())
    flops = counted_flops(model, tokens)
    optimizer = torch.optim.AdamW(parameters)
    gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    optimizer.step()
    moments = sum(s[m].nbytes for s in optimizer.state.values() for m in ("exp_avg", "exp_avg_sq"))
    saved = saved_bytes(model, tokens, tokens.clone())
    model.checkpointing = True
    recomputed = saved_bytes(model, tokens, tokens.clone())
    cache = model.new_cache(B, max_length=T)
    with torch.no_grad():
        _, states = model(tokens, cache=cache, return_states=True)
    found = {
        "parameters": (cost.parameters, sum(p.numel() for p in parameters)),
        "FLOPs forward": (cost.flops_forward, flops.forward),
        "FLOPs backward": (cost.flops_backward, flops.backward),
        "FLOPs of a decoding step": (step.flops_forward, counted_step(model, tokens)),
        "gradient bytes": (cost.gradient_bytes, gradients),
        "optimizer bytes": (cost.optimizer_bytes, moments),
        "saved bytes": (cost.saved_bytes, saved),
        "saved bytes, checkpointed": (cost.saved_bytes_checkpointed or 0, recomputed),
        "decode state bytes": (cost.decode_state_bytes, cache.nbytes),
    }
    for at in boundaries(cfg, B, T, range(1, cfg.n_blocks)):
        crossing = named_tensors(states[f"block.{at.after}"]).values()
        found[f"boundary bytes after block {at.after}"] = (at.sent["full"], sum(x.nbytes for x in crossing))
    return [Check(name, quantity, *pair) for quantity, pair in found.items()]


def pairs() -> list[Check]:
    """Visible pairs against the mask's True entries, and those of a long row."""
    found = [
        Check(
            f"T={seq_len}, w={window}",
            "visible pairs",
            visible_pairs(seq_len, window),
            _true(seq_len, window),
        )
        for seq_len in (7, 130)
        for window in (1, 4, 64, 512, None)
    ]
    return [*found, Check("T=2048, w=512", "visible pairs", visible_pairs(2048, 512), _true(2048, 512))]


def _true(seq_len: int, window: int | None) -> int:
    return int(visible(seq_len, seq_len, window).sum())
