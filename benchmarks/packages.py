"""Public packages that ours is measured beside. One that is not installed is said to stderr and noted in the results
as "left out", so that a table does not look complete when it is not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn


def installed(package: str) -> bool:
    """Whether a package can be imported; one that cannot is said, once."""
    found = importlib.util.find_spec(package) is not None
    if not found:
        say_left_out(package, "not installed")
    return found


@cache
def say_left_out(what: str, why: str) -> None:
    """One line to stderr."""
    print(f"left out: {what} ({why})", file=sys.stderr, flush=True)


def still_left_out(asked: list[str], there: list[str]) -> dict[str, list[str]]:
    """What was asked for and is not among the names of rows, as an entry of a report; none if all is there."""
    missing = [name for name in dict.fromkeys(asked) if name not in there]
    return {"left out": missing} if missing else {}


def attn_res(dtype: torch.dtype) -> Callable[..., Tensor]:
    """attn-res: a read by a query of its own."""
    from attn_res.main import AttnResOperator

    peer = AttnResOperator(512).to(dtype)
    return lambda q, *xs: peer(torch.stack(xs)) + 0 * q.sum()


def hyper_connections(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """hyper-connections: a sublayer of four streams around nothing, and the inputs that have gradients."""
    from hyper_connections import HyperConnections

    module = HyperConnections(4, dim=512, branch=nn.RMSNorm(512), layer_index=0)

    def peer(
        x: Tensor, *rest: Tensor
    ) -> Tensor:  # its float32 weights take bf16 streams under autocast alone
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result: Tensor = module(x)
        return result

    flat = torch.randn(16, 512, 512).to(dtype).requires_grad_()
    total = peer(flat).sum()
    parameters = list(module.parameters())
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return peer, (flat, *(p for p, g in zip(parameters, found, strict=True) if g is not None))


def local(window: int, size: int) -> Callable[..., Tensor]:
    """local-attention: its windows are whole blocks, as many as reach as far as ours."""
    from local_attention import LocalAttention

    return LocalAttention(
        window_size=size, look_backward=-(-(window - 1) // size), causal=True, exact_windowsize=True, autopad=True,
        use_rotary_pos_emb=False,
    )  # fmt: skip
