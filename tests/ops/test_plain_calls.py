"""What docs/guides/operators.md says has no kernel: none is asked for, also with TWOAXIS_BACKEND=native."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, randn

from twoaxis.ops import (
    channel_read,
    choice,
    delta_rewrite,
    depth_read,
    depthwise_causal_conv,
    local_attention,
    mhc_gates,
    mix,
    sinkhorn,
)
from twoaxis.verify.uses import uses

GUIDE = Path(__file__).parents[2] / "docs/guides/operators.md"
X = randn(2, 70, 6)
HEADS = randn(2, 2, 70, 4)
CALLS: dict[str, Callable[[], Tensor]] = {
    "`depth_read` with several heads": lambda: depth_read(X[0, 0], (X, X), heads=2),
    "`delta_rewrite` with other than 1, 2, 4 or 8": lambda: delta_rewrite(
        randn(2, 70, 6, 3), X, randn(2, 70, 3), randn(2, 70), 1e-5
    ),
    "`mhc_gates` with `eps`": lambda: mhc_gates(randn(2, 70, 24), randn(3), randn(24), 4, eps=1e-3)[0],
    "`mix` by weights of several kinds": lambda: mix((X, X), (randn(()), randn(2, 70))),
    "`depthwise_causal_conv` with segments": lambda: depthwise_causal_conv(
        X, randn(6, 3), segments=torch.zeros(2, 70, dtype=torch.int64)
    ),
    "several channels of each": lambda: depthwise_causal_conv(X[..., None], randn(6, 2, 3)),
    "sink tokens": lambda: local_attention(HEADS, HEADS, HEADS, 65, sink_tokens=1),
    "a position bias": lambda: local_attention(HEADS, HEADS, HEADS, 65, position_bias=randn(2, 65)),
    "`reach`": lambda: local_attention(HEADS, HEADS, HEADS, 65, reach=torch.arange(70) + 1),
    "`channel_read`": lambda: channel_read(randn(2, 70, 6, 4), randn(6, 4)),
    "`sinkhorn`": lambda: sinkhorn(randn(2, 70, 4, 4)),
    "float64": lambda: depth_read(X[0, 0].double(), (X.double(), X.double())),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_without_a_kernel_is_plain_and_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str, required: bool = False) -> None:
        raise AssertionError(f"the kernel {name} is asked for")

    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    monkeypatch.setattr(choice, "library", library)
    CALLS[what]()
    said = GUIDE.read_text().split("**Without a kernel**")[1].split("\n\n")[0]
    assert what in said.replace("\n", " ")


def test_verify_lists_them() -> None:
    plain = {(use.operator, use.call) for use in uses() if use.backend == "plain"}
    assert plain >= {("depth_read", "float32, 2 heads"), ("delta_rewrite", "float32, m=3")}
