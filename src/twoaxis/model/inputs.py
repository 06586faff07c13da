"""What a decoder takes: every refusal in one line, before anything is computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from twoaxis.cache import Cache
from twoaxis.errors import InputError


def check_inputs(
    tokens: Tensor, segments: Tensor | None, positions: Tensor | None, cache: Cache | None
) -> None:
    """InputError for what `Decoder.forward` does not define."""
    check_ids("tokens", tokens)
    if segments is not None and segments.shape != tokens.shape:
        raise InputError(
            f"segments {tuple(segments.shape)} must have the shape of tokens {tuple(tokens.shape)}"
        )
    if positions is not None and positions.shape not in (tokens.shape, tokens.shape[1:]):
        raise InputError(
            f"positions {tuple(positions.shape)} must be (T,) or (B, T) for tokens {tuple(tokens.shape)}"
        )
    if cache is not None and not isinstance(cache, Cache):
        raise InputError(f"cache must be made by model.new_cache(batch_size), not {type(cache).__name__}")
    if cache is not None and cache.batch_size != tokens.shape[0]:
        raise InputError(
            f"the cache was made for batch {cache.batch_size} and tokens have {tokens.shape[0]} rows"
        )


def check_ids(name: str, ids: Tensor) -> None:
    """InputError unless these are ids (B, T) in a dtype that an embedding reads."""
    if not isinstance(ids, Tensor):
        raise InputError(f"{name} must be a tensor of integers (B, T), not {type(ids).__name__}")
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        given = f"{ids.dtype} {tuple(ids.shape)}"
        raise InputError(f"{name} must be integers (B, T), not {given}; give them in int64 or int32")


def check_targets(tokens: Tensor, targets: Tensor) -> None:
    """InputError unless there is one target in int64 for each token."""
    check_ids("tokens", tokens)
    check_ids("targets", targets)
    if targets.shape != tokens.shape or targets.dtype != torch.int64:
        raise InputError(
            f"targets {targets.dtype} {tuple(targets.shape)}: "
            f"give one in int64 for each of tokens {tuple(tokens.shape)}"
        )


def look_up(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """The rows of an embedding (B, T, d); InputError naming an id that it does not have."""
    if torch.compiler.is_compiling():
        return _rows(table, tokens)
    try:
        return _rows(table, tokens)
    except IndexError:
        ids = tokens[(tokens < 0) | (tokens >= table.num_embeddings)]
        raise InputError(
            f"tokens has {int(ids[0])}: the model's ids are 0 to {table.num_embeddings - 1}"
        ) from None


def _rows(table: nn.Embedding, tokens: Tensor) -> Tensor:
    rows: Tensor = table(tokens)
    return rows
