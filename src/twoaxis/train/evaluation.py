"""Scoring a model on a token file: every token after the first is a target exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twoaxis.data import Batch, TokenFile, eval_batches
from twoaxis.errors import InputError
from twoaxis.model import Decoder
from twoaxis.train.precision import computing_in


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A score: summed loss in nats over `tokens` targets, which stand for `bytes` bytes of text."""

    nats: float
    tokens: int
    bytes: float
    bits_per_byte: float

    @property
    def loss(self) -> float:
        """Mean loss per target in nats."""
        return self.nats / self.tokens


def evaluate(
    model: Decoder,
    tokens: TokenFile,
    seq_len: int,
    batch_size: int,
    max_tokens: int | None = None,
    precision: str = "float32",
    packing: str = "stream",
    share: tuple[int, int] = (0, 1),
    summed: Callable[[list[float]], list[float]] = list,
) -> Evaluation:
    """Score `model` in evaluation mode, without gradients, and leave it in the mode it was in.

    Rows of `seq_len` side by side, the last one padded; totals and counts do not depend on `batch_size`.
    max_tokens: score that many first targets only. share, summed: score every n-th batch only, as (which, n),
    and the sums over all who do; each runs the model as often. InputError when no token is a target.
    """
    seq_len = min(seq_len, max(tokens.n_tokens - 1, 1))  # a longer row would only be padding
    batches = eval_batches(tokens, seq_len, batch_size, max_tokens, packing)
    device, training = model.embedding.weight.device, model.training
    nats, count = 0.0, 0.0
    model.eval()
    try:
        with torch.no_grad(), computing_in(precision, device):
            for batch, counts in _dealt(batches, *share):
                inputs, targets = batch.tokens.to(device), batch.targets.to(device)
                segments = None if batch.segments is None else batch.segments.to(device)
                logits = model(inputs, segments=segments).flatten(0, 1)
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                each = F.cross_entropy(wide, targets.flatten(), ignore_index=-100, reduction="none")
                nats += counts * each.cpu().sum(dtype=torch.float64).item()
                count += counts * int((batch.targets != -100).sum())
    finally:
        model.train(training)
    nats, count = (total for total in summed([nats, float(count)]))
    if count == 0:
        raise InputError("no token of this text is a target: every document has one token; give longer ones")
    return Evaluation(
        nats=nats,
        tokens=int(count),
        bytes=count * tokens.bytes_per_token,
        bits_per_byte=tokens.bits_per_byte(nats, int(count)),
    )


def _dealt(batches: Iterator[Batch], which: int, n: int) -> Iterator[tuple[Batch, bool]]:
    """Every n-th batch, and whether it counts: where the last round is short, some take one that is not theirs."""
    while group := list(itertools.islice(batches, n)):
        yield group[min(which, len(group) - 1)], which < len(group)
