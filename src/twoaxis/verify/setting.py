"""What the identities are computed with: a device, a dtype, its bound, seeded weights and models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twoaxis.errors import InputError
from twoaxis.model import Decoder, ModelConfig
from twoaxis.types import DTYPES

# Largest difference relative to max(1, largest entry), and its size in roundings. The two sides of a row
# add the same numbers in other orders, through a few dozen operations: a few roundings at the largest entry.
BOUNDS = {
    "float64": (1e-12, "5000 roundings of 2^-52"),
    "float32": (1e-5, "80 roundings of 2^-23"),
    "bfloat16": (1e-1, "13 roundings of 2^-7"),
}


@dataclass(frozen=True)
class Setting:
    """Device and dtype of the check; everything random comes from one seeded generator on the CPU."""

    dtype: str = "float64"
    device: str = "cpu"
    seed: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in BOUNDS:
            raise InputError(f"dtype {self.dtype!r}: allowed is {', '.join(BOUNDS)}")
        self.generator.manual_seed(self.seed)
        try:
            self.randn(1)
        except (RuntimeError, TypeError, AssertionError) as error:
            said = str(error).splitlines()[0]
            raise InputError(f"device {self.device!r} cannot be used with {self.dtype}: {said}") from None

    @property
    def bound(self) -> float:
        """The largest error allowed."""
        return BOUNDS[self.dtype][0]

    @property
    def reason(self) -> str:
        """Why that much."""
        return BOUNDS[self.dtype][1]

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers."""
        numbers = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(self.device, DTYPES[self.dtype])

    def tokens(self, batch_size: int, seq_len: int, vocab_size: int) -> Tensor:
        """Token ids."""
        ids = torch.randint(vocab_size, (batch_size, seq_len), generator=self.generator)
        return ids.to(self.device)

    def decoder(self, cfg: ModelConfig) -> Decoder:
        """A model in this dtype with every parameter random, none at its start."""
        model = Decoder(cfg).to(self.device, DTYPES[self.dtype])
        for parameter in model.parameters():
            self._fill(parameter)
        return model.eval()

    def _fill(self, parameter: nn.Parameter) -> None:
        numbers = self.randn(*parameter.shape)
        with torch.no_grad():
            if parameter.ndim < 2:
                parameter.copy_(1 + 0.1 * numbers)
            else:
                parameter.copy_(numbers * parameter.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Row:
    """One identity and how far its two sides are apart, relative to max(1, the largest entry)."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; a NaN is not."""
        return self.error <= self.bound


def difference(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """The largest difference over pairs of tensors, relative to max(1, the largest entry of `other`)."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1))
        if error != error:
            return error  # NaN: the worst there is
        worst = max(worst, error)
    return worst
