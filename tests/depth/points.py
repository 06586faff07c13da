"""Models and single connections at a random point, for the tests of the methods that change the shortcut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis import Context, Decoder, ModelConfig
from twoaxis.depth import build
from twoaxis.depth.stored import plain_parts

CTX = Context()


def perturb(module: nn.Module, scale: float = 0.3) -> Any:
    """Add noise to every parameter."""
    with torch.no_grad():
        for p in module.parameters():
            p += scale * torch.randn_like(p)
    return module


def connection(spec: str, width: int = 6, dtype: torch.dtype = torch.float64) -> Any:
    """One connection at a random point."""
    _, ((made,),) = build(spec, width, [["mlp"]])
    return perturb(made).to(dtype)


def state_of(c: Any, *lead: int) -> Tensor:
    """A random DDL state, (*lead, d) or (*lead, d, m)."""
    channels = (c.cfg.value_dim,) if c.cfg.expanded else ()
    return torch.randn(*lead, c.layout.d_model, *channels, dtype=torch.float64)


def model(spec: str, n_blocks: int = 2, **options: Any) -> Decoder:
    """A tiny model as it starts."""
    torch.manual_seed(3)
    return Decoder(
        ModelConfig(vocab_size=17, d_model=24, n_blocks=n_blocks, n_heads=2, depth=spec, **options)
    )


def saved_bytes(depth: str, n_blocks: int, tokens: int = 3, rebuilding: bool = True, **options: Any) -> int:
    """Bytes saved for backward by one forward pass: every storage once, parameters excluded."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=11, d_model=64, n_blocks=n_blocks, n_heads=2, depth=depth, **options)
    made = Decoder(config)
    made.rebuilding = rebuilding
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in plain_parts(tensor).values():
            kept[part.untyped_storage().data_ptr()] = part.untyped_storage()
        return tensor

    given = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = made.loss(given, given)
    loss.backward()
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in own)
