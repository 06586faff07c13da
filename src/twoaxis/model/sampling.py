"""How the next token is chosen from logits: greedily or drawn, with or without a penalty on repetition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twoaxis.errors import InputError, RunError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The options of a choice, checked.

    temperature: 0 takes the likeliest token, otherwise tokens are drawn from softmax(logits / temperature).
    top_k, top_p: draw only from the k likeliest tokens, and from the fewest that hold probability p.
    repetition_penalty: see `penalised`; 1 is none.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        t, k, p, r = self.temperature, self.top_k, self.top_p, self.repetition_penalty
        finite = float("inf")
        for name, value, fits, allowed in (
            ("temperature", t, _number(t) and (t == 0 or 1e-30 <= t < finite), "0, or 1e-30 or more"),
            ("top_k", k, k is None or (type(k) is int and k >= 1), "1 or more, or None"),
            ("top_p", p, p is None or (_number(p) and 0 < p <= 1), "above 0 up to 1, or None"),
            ("repetition_penalty", r, _number(r) and 0 < r < finite, "above 0; 1 is none"),
        ):
            if not fits:
                raise InputError(f"{name}={value!r}: allowed is {allowed}")
        if t == 0 and (k, p) != (None, None):
            raise InputError(
                "top_k and top_p need a temperature above 0; temperature=0 takes the likeliest token"
            )

    @property
    def penalises(self) -> bool:
        """Whether a choice depends on the tokens seen."""
        return self.repetition_penalty != 1

    def choose(self, logits: Tensor, seen: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """One token (B, 1) for each row of logits (B, V); seen (B, V) marks the tokens to penalise."""
        if seen is not None:
            logits = penalised(logits, seen, self.repetition_penalty)
        return choose(logits, self.temperature, self.top_k, self.top_p, generator)


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits x (B, V), for tokens marked in seen (B, V) x / penalty where x > 0 and x * penalty where x < 0.

    CTRL's rule (arXiv 1909.05858, section 4.1) divides every score; for a negative one that would make the
    token likelier, so those are multiplied, as public implementations do.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def choose(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token (B, 1) for each row of logits (B, V). RunError where they are no numbers."""
    likeliest = logits.argmax(-1, keepdim=True)  # of a NaN where there is one
    top = logits.gather(-1, likeliest)
    if bool(top.isnan().any() if temperature == 0 else not top.isfinite().all()):
        raise RunError(
            "the model's logits are not finite numbers; its weights may not be, or overflow their dtype"
        )
    if temperature == 0:
        return likeliest
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores, order = ((logits.to(wide) - top.to(wide)) / temperature).sort(-1, descending=True)
    if top_k is not None:
        scores = scores[:, :top_k]
    p = scores.softmax(-1)
    if top_p is not None:
        p = p * (p.cumsum(-1) - p < top_p)  # a token counts while those before it hold less than top_p
    return order.gather(1, torch.multinomial(p, 1, generator=generator)) if len(p) else order[:, :1]


def _number(value: object) -> bool:
    return type(value) in (int, float)
