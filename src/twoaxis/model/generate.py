"""Decoding: continue token rows greedily or by sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from twoaxis.errors import InputError
from twoaxis.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    end_ids: Sequence[int] = (),
    pad_id: int | None = None,
    segments: Tensor | None = None,
    use_cache: bool = True,
    generator: torch.Generator | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The rows of tokens (B, T) continued by at most `max_new_tokens`: (B, T + new), in evaluation mode.

    temperature: 0 takes the likeliest token, otherwise tokens are drawn from softmax(logits / temperature).
    top_k, top_p: draw only from the k likeliest tokens, and from the fewest that hold probability p.
    end_ids: a row ends with any of these and is filled up with `pad_id` (by default the first end id);
    decoding stops when every row has ended. segments: (B, T) document ids, -1 marks padding on the left; the
    last document goes on. use_cache=False reads the whole row again for each token, with the same result.
    on_token: called with each step's tokens (B, 1) as they are made.

    Raises InputError for arguments that cannot be met.
    """
    _check_sampling(temperature, top_k, top_p)
    _check_tokens(model, tokens, segments, max_new_tokens, [*end_ids, *([] if pad_id is None else [pad_id])])
    ends = torch.tensor(list(end_ids), dtype=tokens.dtype, device=tokens.device)
    fill = pad_id if pad_id is not None or not end_ids else end_ids[0]
    cache = model.new_cache(len(tokens), tokens.shape[1] + max_new_tokens) if use_cache else None
    ended = torch.zeros_like(tokens[:, :1], dtype=torch.bool)
    unread, ids, out = tokens, segments, [tokens]
    for _ in range(max_new_tokens):
        with evaluating(model):
            logits = model(unread, segments=ids, cache=cache)[:, -1]
        new = choose(logits, temperature, top_k, top_p, generator)
        if fill is not None:
            new = new.masked_fill(ended, fill)
        out.append(new)
        if on_token is not None:
            on_token(new)
        ended = ended | torch.isin(new, ends)
        if len(ends) and bool(ended.all()):
            break
        unread = new if use_cache else torch.cat((unread, new), 1)
        if ids is not None:
            ids = None if use_cache else torch.cat((ids, ids[:, -1:]), 1)
    return torch.cat(out, 1)


def choose(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token (B, 1) for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores, order = ((logits - logits.amax(-1, keepdim=True)) / temperature).sort(-1, descending=True)
    if top_k is not None:
        scores = scores[:, :top_k]
    p = scores.softmax(-1)
    if top_p is not None:
        p = p * (p.cumsum(-1) - p < top_p)  # a token counts while those before it hold less than top_p
    return order.gather(1, torch.multinomial(p, 1, generator=generator)) if len(p) else order[:, :1]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every module has the mode it had before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    for name, value, fits, allowed in (
        ("temperature", temperature, _number(temperature) and 0 <= temperature < float("inf"), "0 or more"),
        ("top_k", top_k, top_k is None or (type(top_k) is int and top_k >= 1), "1 or more, or None"),
        ("top_p", top_p, top_p is None or (_number(top_p) and 0 < top_p <= 1), "above 0 up to 1, or None"),
    ):
        if not fits:
            raise InputError(f"{name}={value!r}: allowed is {allowed}")
    if temperature == 0 and (top_k, top_p) != (None, None):
        raise InputError(
            "top_k and top_p need a temperature above 0; temperature=0 takes the likeliest token"
        )


def _check_tokens(
    model: Decoder, tokens: Tensor, segments: Tensor | None, max_new_tokens: int, ids: list[int]
) -> None:
    vocab = model.cfg.vocab_size
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens!r}: allowed is an integer of 0 or more")
    if tokens.ndim != 2 or tokens.shape[1] == 0 or tokens.dtype != torch.long:
        raise InputError(
            f"tokens {tokens.dtype} {tuple(tokens.shape)}: give int64 ids (B, T) with T of 1 or more"
        )
    for given, name in ((tokens.flatten().tolist(), "tokens"), (ids, "end_ids or pad_id")):
        wrong = [i for i in given if type(i) is not int or not 0 <= i < vocab]
        if wrong:
            raise InputError(f"{name} has {wrong[0]!r}: the model's ids are 0 to {vocab - 1}")
    if segments is not None:
        if segments.shape != tokens.shape:
            raise InputError(f"segments {tuple(segments.shape)}: give one id per token {tuple(tokens.shape)}")
        if bool((segments[:, -1] < 0).any()):
            raise InputError("segments end with padding (-1): put the padding on the left of each row")


def _number(value: object) -> bool:
    return type(value) in (int, float)
