"""Inputs and options of `local_attention` for its tests."""

import torch
from torch import Tensor

Options = dict[str, object]


def qkv(
    T: int, D: int = 3, *, B: int = 2, H: int = 4, Hkv: int = 2, Tq: int | None = None, dtype=torch.float64
) -> list[Tensor]:
    """Random q (B, H, Tq, D), k and v (B, Hkv, T, D)."""
    shapes = [(B, H, T if Tq is None else Tq, D), (B, Hkv, T, D), (B, Hkv, T, D)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def documents(B: int, T: int) -> Tensor:
    """Ids of packed documents of odd lengths, with padding in front, between and behind: (B, T)."""
    ids = torch.full((B, T), -1)
    for b in range(B):
        start, document = b, 0
        for length in (2, 41, 1, 17, 5, 90, 3, 300):
            ids[b, start : start + length] = document
            start += length + (document % 3 == 2)
            document += 2
    ids[:, T - (T > 4) :] = -1
    return ids


NAMES = [
    "plain",
    "scale",
    "documents",
    "sink_logits",
    "sink_tokens",
    "position_bias",
    "documents_sinks",
    "all",
]


def options(
    name: str, T: int, window: int | None, dtype=torch.float64, B: int = 2, H: int = 4
) -> tuple[Options, list[str]]:
    """Keyword arguments, and which of them are differentiable."""
    everything = name == "all"
    found: Options = {}
    if name == "scale" or everything:
        found["scale"] = 0.7
    if name in ("documents", "documents_sinks") or everything:
        found["segments"] = documents(B, T)
    if name in ("sink_tokens", "documents_sinks") or everything:
        found["sink_tokens"] = 2
    if name == "sink_logits" or everything:
        found["sink_logits"] = torch.randn(H, dtype=dtype)
    if (name == "position_bias" or everything) and window is not None:
        found["position_bias"] = torch.randn(H, window, dtype=dtype)
    return found, [key for key in ("sink_logits", "position_bias") if key in found]


def backends(name: str) -> list[str]:
    """The backends that have the options of a case."""
    exotic = name in ("sink_logits", "position_bias", "all")
    return ["blocked", "auto"] if exotic else ["blocked", "sdpa", "auto"]
