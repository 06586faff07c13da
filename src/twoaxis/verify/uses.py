"""Which backend takes which calls here, under the present TWOAXIS_BACKEND."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from twoaxis.ops import choice
from twoaxis.ops.local_attention import choose
from twoaxis.ops.native import delta_rewrite as native_rewrite
from twoaxis.ops.native import depth_read as native_read
from twoaxis.ops.native import local_attention as native_attention
from twoaxis.ops.token_read import Options
from twoaxis.verify.backends import TYPES
from twoaxis.verify.operators import operators
from twoaxis.verify.steps import steps


@dataclass(frozen=True)
class Use:
    """What a kind of call is computed by under the present TWOAXIS_BACKEND."""

    operator: str
    call: str
    backend: str


def attention_by() -> str:
    """What computes attention in bfloat16 where a kernel does: "tiles", or "vectors" and why."""
    library = choice.library("local_attention")
    if library is None:
        return "no kernel"
    reason = native_attention.settle(library)
    return f"vectors: {reason}" if reason else "tiles"


def uses() -> list[Use]:
    """Which backend takes which calls here."""
    return [*_read_uses(), *_rewrite_uses(), *_other_uses(), *_attention_uses(), *_step_uses()]


def _read_uses() -> Iterator[Use]:
    for dtype in TYPES.values():
        for heads in (1, 2):
            sources = (torch.zeros(2, 9, 8, dtype=dtype),) * 2
            covered = native_read.covers(Options(1e-6, 1.0, "softmax", heads, None, False), sources)
            found = choice.kernel("depth_read", sources) if covered else None
            what = f"{_short(dtype)}, {heads} head{'s' * (heads > 1)}"
            yield Use("depth_read", what, "plain" if found is None else "native")


def _rewrite_uses() -> Iterator[Use]:
    for dtype in TYPES.values():
        for m in (1, 3, 4):
            state, direction = torch.zeros(2, 9, 8, m, dtype=dtype), torch.zeros(2, 9, 8, dtype=dtype)
            covered = native_rewrite.covers(state, direction, m)
            found = choice.kernel("delta_rewrite", (state,), (direction,)) if covered else None
            yield Use("delta_rewrite", f"{_short(dtype)}, m={m}", "plain" if found is None else "native")


def _other_uses() -> Iterator[Use]:
    for one in operators():
        if one.name not in ("depth_read", "delta_rewrite"):
            for dtype in TYPES.values():
                found = choice.kernel(one.kernel, [x.to(dtype) for x in one.inputs()[:1]])
                yield Use(one.name, _short(dtype), "plain" if found is None else "native")


def _attention_uses() -> Iterator[Use]:
    kinds = {"window 64 of 512": (512, 512, 64), "full causal, 512": (512, 512, None)}
    kinds |= {"one query against 512 keys": (1, 512, 64), "48 keys": (48, 48, 16)}
    for dtype in TYPES.values():
        for what, (Tq, Tk, window) in kinds.items():
            q, k = torch.zeros(1, 2, Tq, 64, dtype=dtype), torch.zeros(1, 2, Tk, 64, dtype=dtype)
            yield Use("local_attention", f"{_short(dtype)}, {what}", choose("auto", q, k, k, window))


@torch.no_grad()
def _step_uses() -> Iterator[Use]:
    threads = torch.get_num_threads()
    for step in steps():
        takes = threads == 1 or not step.one_thread
        native = takes and choice.step_kernel(step.kernel) is not None
        call = "float32, decoding" if takes else f"float32, decoding with {threads} threads"
        yield Use(step.operator, call, "native" if native else "plain")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
