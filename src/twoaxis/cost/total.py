"""The cost of a whole model: the sum of what its parts say of themselves.

| part           | parameters          | FLOPs forward, for each of the B * T tokens                     |
|----------------|---------------------|-----------------------------------------------------------------|
| embedding      | V d                 | 0 (a look-up)                                                   |
| head           | V d, or 0 when tied | 2 V d                                                           |
| depth          | `DepthConfig.cost`  | reads and writes of all blocks; norms' parameters               |
| kinds of cores | `.cost`             | 2 per weight; attention 4 D H for each visible (query, key) pair |

A multiplication and an addition are two FLOPs. The backward pass of a product is two products of the same
size, so it counts twice the forward one. Norms, activations, rotations and softmaxes are not counted. Visible
pairs are sum_t min(t + 1, window): what a dense mask computes and throws away is not counted. Bytes, launches
and the FLOPs of the whole come from one pass noted on a tape (`passes.py`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, get_args

from twoaxis.cost.boundaries import largest
from twoaxis.cost.counts import NOTHING, counts, recomputed_bytes
from twoaxis.cost.passes import traced
from twoaxis.errors import InputError
from twoaxis.model.config import ModelConfig
from twoaxis.tape import Backend
from twoaxis.types import DTYPES, Cost, Shape

Phase = Literal["training", "decoding"]
FORWARD_ONLY: dict[str, Any] = {  # a decoding step keeps nothing for a backward pass
    **dict.fromkeys(("flops_backward", "gradient_bytes", "optimizer_bytes"), 0),
    **{f.name: None for f in fields(Cost) if f.name.endswith("backward") and f.type == "int | None"},
    **dict.fromkeys(("saved_bytes", "saved_bytes_checkpointed", "recomputed_bytes")),
}


def cost(
    cfg: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    dtype: str = "float32",
    max_rollback: int = 0,
    phase: Phase = "training",
    backend: Backend = "plain",
) -> Cost:
    """What a model costs on `batch_size` rows of `seq_len` tokens, without building it.

    parameters: learned numbers. flops_forward, flops_backward: of one training step over all tokens.
    decode_state_bytes: `model.new_cache(batch_size, seq_len, max_rollback).nbytes`. boundary_bytes: what a
    block hands on, at the block boundary where that is largest. by_part: the same counts of "embedding",
    "head", "depth" and each kind of core summed over blocks. dtype: of the weights, and so of the cache.
    phase: "training" counts a whole step, "decoding" the forward pass of the seq_len-th token of each row
    from its cache. backend: what computes the operators, of saved bytes and of bytes and launches kernel by kernel:
    "plain" is PyTorch's own operations, "native" this package's kernels for CPUs where they cover a call
    (TWOAXIS_BACKEND; FLOPs and the fused limit know no backend). docs/guides/cost.md says what each field counts
    and what it is held to.

    Raises InputError for sizes below 1, for more than 2^24 tokens a row and for unknown dtypes.
    """
    if not isinstance(cfg, ModelConfig):
        raise InputError(f"what costs is a ModelConfig, not {cfg!r}")
    _check(batch_size, seq_len, dtype, max_rollback, phase, backend)
    shape = Shape(
        layout=cfg.layout(), batch_size=batch_size, seq_len=seq_len, dtype=dtype, max_rollback=max_rollback
    )
    parts = _stated(cfg, shape)
    tape = traced(cfg, batch_size, seq_len, dtype, phase == "decoding", backend)
    if tape is None:
        return replace(sum(parts.values(), start=Cost()), by_part=parts)
    found, alone = counts(tape), FORWARD_ONLY if phase == "decoding" else {}
    for name, part in parts.items():
        derived: dict[str, Any] = NOTHING | found[name] | alone
        parts[name] = replace(part, **derived)
    whole: dict[str, Any] = {} if alone else {"recomputed_bytes": recomputed_bytes(tape)}
    boundary = largest(tape, cfg.depth_config().pushes)
    return replace(sum(parts.values(), start=Cost()), boundary_bytes=boundary, by_part=parts, **whole)


def _check(
    batch_size: int, seq_len: int, dtype: str, max_rollback: int, phase: Phase, backend: Backend
) -> None:
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name}={value!r}: allowed is an integer of 1 or more")
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r}: allowed is {' or '.join(DTYPES)}")
    if phase not in get_args(Phase):
        raise InputError(f"phase={phase!r}: allowed is 'training' or 'decoding'")
    if backend not in get_args(Backend):
        raise InputError(f"backend={backend!r}: allowed is 'plain' or 'native'")
    if type(max_rollback) is not int or max_rollback < 0:
        raise InputError(f"max_rollback={max_rollback!r}: allowed is an integer of 0 or more")


def _stated(cfg: ModelConfig, shape: Shape) -> dict[str, Cost]:
    """What each part says of itself, with the bytes of its gradients and of AdamW's two moments."""
    depth, table = cfg.depth_config(), cfg.vocab_size * cfg.d_model
    flops = 2 * table * shape.tokens
    parts = {
        "embedding": Cost(parameters=table),
        "head": Cost(
            parameters=0 if cfg.tie_embeddings else table, flops_forward=flops, flops_backward=2 * flops
        ),
        "depth": depth.cost(shape),
    }
    for block, cores in enumerate(cfg.block_configs()):
        for index, core in enumerate(cores):
            options = depth.core_options_at(shape.layout, block, index)
            parts[core.kind] = parts.get(core.kind, Cost()) + core.cost_as_built(shape, block, options)
    learned = {name: part.parameters * DTYPES[shape.dtype].itemsize for name, part in parts.items()}
    return {
        name: replace(part, gradient_bytes=learned[name], optimizer_bytes=2 * learned[name])
        for name, part in parts.items()
    }
