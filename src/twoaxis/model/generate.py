"""Decoding: continue token rows greedily or by sampling, token by token, as a stream or as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twoaxis.errors import InputError
from twoaxis.model.decoder import Decoder
from twoaxis.model.lookup import accepted, drafts
from twoaxis.model.modes import evaluating_modules
from twoaxis.model.sampling import Sampling
from twoaxis.model.text import Decode, TextStream, check_stop


def generate(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    on_token: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> Tensor:
    """The rows of tokens (B, T) continued by at most `max_new_tokens`: (B, T + new), in evaluation mode.

    on_token: called with each step's tokens (B, 1) as they are made. The other options, what a row that has
    ended is filled with, and what is refused: see `generate_stream`.
    """
    out = [tokens]
    for new in generate_stream(model, tokens, max_new_tokens, temperature, **options):
        out.append(new)
        if on_token is not None:
            on_token(new)
    return torch.cat(out, 1)


def generate_text(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    decode: Decode,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """Pieces of the text that continues one row (1, T), as soon as they are certain, up to a stop string.

    decode: ids -> text, such as a tokenizer's. Options: see `generate_stream`.
    """
    if tokens.ndim != 2 or len(tokens) != 1:
        raise InputError(f"tokens {tuple(tokens.shape)}: text is made from one row, (1, T)")
    new = generate_stream(model, tokens, max_new_tokens, temperature, decode=decode, stop=stop, **options)
    return _pieces(new, TextStream(decode, stop))


def _pieces(tokens: Iterator[Tensor], text: TextStream) -> Iterator[str]:
    for new in tokens:
        if piece := text.add(int(new)):
            yield piece
    if piece := text.finish():
        yield piece


def generate_stream(
    model: Decoder,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    end_ids: Sequence[int] = (),
    pad_id: int | None = None,
    stop: Sequence[str] = (),
    decode: Decode | None = None,
    segments: Tensor | None = None,
    use_cache: bool = True,
    prompt_lookup: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens (B, 1) that continue the rows of tokens (B, T), step after step, in evaluation mode.

    temperature, top_k, top_p, repetition_penalty: see `Sampling`; repetition counts tokens of the row's
    document, the prompt's included.
    end_ids: a row ends with any of these. stop: a row ends with the token that completes any of these strings
    in the text it has made; needs `decode`, ids -> text. A row that has ended is filled up with `pad_id` (by
    default the first end id, else 0); decoding stops when every row has ended.
    segments: (B, T) document ids, -1 marks padding on the left, so rows may differ in length; the last
    document goes on. use_cache=False reads the whole row again for each token, with the same result.
    prompt_lookup: draft up to so many tokens from what the row has said before and verify them in one pass:
    the same tokens as greedy decoding (up to ties within rounding), in fewer passes where text repeats.

    Raises InputError, before anything is computed, for arguments that cannot be met.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
    )
    ids = [*end_ids, *([] if pad_id is None else [pad_id])]
    _check_tokens(model, tokens, segments, max_new_tokens, ids)
    _check_lookup(prompt_lookup, temperature, use_cache)
    if check_stop(stop) and decode is None:
        raise InputError("stop strings need decode=, the function that turns ids into text")
    rows = _Rows(model, tokens, segments, sampling, generator, use_cache, max_new_tokens, prompt_lookup)
    fill = pad_id if pad_id is not None else next(iter(end_ids), 0)
    texts = [TextStream(decode, stop) for _ in tokens] if stop and decode is not None else []
    return _ended_rows(rows, torch.tensor(list(end_ids), dtype=torch.long, device=tokens.device), fill, texts)


@torch.no_grad()
def _ended_rows(rows: _Rows, ends: Tensor, fill: int, texts: list[TextStream]) -> Iterator[Tensor]:
    """The rows' tokens with those after an end filled in; nothing more once all have ended."""
    while rows.left:
        for new in rows.step().split(1, 1):
            if rows.ending:
                new = new.masked_fill(rows.ended, fill)
            yield new
            if len(ends):
                rows.end(torch.isin(new, ends))
            for b, text in enumerate(texts):
                if not text.stopped and not rows.ended[b]:
                    text.add(int(new[b]))
            if texts:
                rows.end(rows.ended.new_tensor([[text.stopped] for text in texts]))
            if rows.ending and bool(rows.ended.all()):
                return


@dataclass
class _Rows:
    """The rows on their way: what was said, what the model has not read yet, and its cache."""

    model: Decoder
    said: Tensor  # (B, T + new)
    segments: Tensor | None  # of the tokens not read yet, None when they follow from the cache
    sampling: Sampling
    generator: torch.Generator | None
    use_cache: bool
    left: int
    lookup: int
    ending: bool = False  # whether any row has ended
    ended: Tensor = field(init=False)  # (B, 1)

    def __post_init__(self) -> None:
        self.cache: Any = None
        if self.use_cache:
            length = self.said.shape[1] + self.left
            self.cache = self.model.new_cache(len(self.said), length, self.lookup)
        self.unread, self.modules = self.said, list(self.model.modules())
        self.ended = torch.zeros_like(self.said[:, :1], dtype=torch.bool)
        self.seen: Tensor | None = None  # (B, V) the tokens of each row's document
        if self.sampling.penalises:
            own = torch.ones_like(self.said, dtype=torch.bool)
            if self.segments is not None:
                own = self.segments == self.segments[:, -1:]
            counts = torch.zeros(len(own), self.model.cfg.vocab_size, dtype=torch.long, device=own.device)
            self.seen = counts.scatter_add(1, self.said, own.long()) > 0

    def end(self, which: Tensor) -> None:
        """Rows (B, 1) that have ended now."""
        self.ended = self.ended | which
        self.ending = True

    def step(self) -> Tensor:
        """The next tokens, (B, 1 or more)."""
        draft = drafts(self.said, min(self.lookup, self.left - 1)) if self.lookup else self.said[:, :0]
        unread = torch.cat((self.unread, draft), 1) if draft.shape[1] else self.unread
        segments, n = self.segments, draft.shape[1]
        if segments is not None and n:
            segments = torch.cat((segments, segments[:, -1:].expand(-1, n)), 1)
        with evaluating_modules(self.modules), torch.inference_mode():
            logits = self.model(unread, segments=segments, cache=self.cache, last=n + 1)
            new = self._chosen(logits, draft)
        new = new.clone()  # an ordinary tensor, for whatever is done with it
        if n:
            kept = accepted(draft, new, self.ended)
            self.cache.drop_last(n - kept)
            new = new[:, : kept + 1]
        self._take(new)
        return new

    def _chosen(self, logits: Tensor, draft: Tensor) -> Tensor:
        """The choice after each of the last tokens, as if it were alone: (B, 1 + drafted)."""
        seen, new = self.seen, []
        for i, step in enumerate(logits.unbind(1)):
            new.append(self.sampling.choose(step, seen, self.generator))
            if seen is not None and i < draft.shape[1]:
                seen = seen.scatter(1, draft[:, i : i + 1], True)
        return new[0] if len(new) == 1 else torch.cat(new, 1)

    def _take(self, new: Tensor) -> None:
        if self.lookup or not self.use_cache:
            self.said = torch.cat((self.said, new), 1)
        if self.seen is not None:
            self.seen = self.seen.scatter(1, new, True)
        self.left -= new.shape[1]
        self.unread = new[:, -1:] if self.use_cache else self.said
        if self.use_cache:
            self.segments = None
        elif self.segments is not None:
            self.segments = torch.cat((self.segments, self.segments[:, -1:].expand(-1, new.shape[1])), 1)


def _check_lookup(count: int, temperature: float, use_cache: bool) -> None:
    if type(count) is not int or count < 0:
        raise InputError(f"prompt_lookup={count!r}: allowed is an integer of 0 or more (0 is off)")
    if count and (temperature != 0 or not use_cache):
        raise InputError("prompt_lookup verifies greedy tokens: it needs temperature=0 and use_cache=True")


def _check_tokens(
    model: Decoder, tokens: Tensor, segments: Tensor | None, max_new_tokens: int, ids: list[int]
) -> None:
    vocab = model.cfg.vocab_size
    if type(max_new_tokens) is not int or max_new_tokens < 0:
        raise InputError(f"max_new_tokens={max_new_tokens!r}: allowed is an integer of 0 or more")
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens must be a tensor of integers (B, T) in int64, not {type(tokens).__name__}")
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
