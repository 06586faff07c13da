"""A decode step that is compiled once: tensors of fixed shapes go in, all counting stays outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twoaxis.cache import Cache
from twoaxis.errors import InputError
from twoaxis.model.decoder import Decoder


def compiled_step(model: Decoder, cache: Cache, **options: Any) -> Callable[..., Tensor]:
    """A function that does what `model(tokens, segments=, positions=, cache=cache)` does, by torch.compile.

    One compilation serves all steps of one shape (B, T), whatever the cache has seen: a prompt is one shape,
    single tokens are another. options: of `torch.compile`.

    Raises InputError for a cache that was not made with `fixed_shapes=True`: the rows it returns grow, and
    each length would be compiled anew.
    """
    if not cache.fixed_shapes:
        raise InputError("compiled_step needs a cache of one shape: new_cache(..., fixed_shapes=True)")
    run = torch.compile(model.run, dynamic=False, **options)

    def step(tokens: Tensor, *, segments: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        logits: Tensor = run(tokens, model.context(tokens, segments, positions, cache))
        cache.advance(tokens.shape[1])
        return logits

    return step
