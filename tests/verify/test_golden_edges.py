"""Recordings at the edges of their options: a prompt that is everything, and what is not run rather than wrong."""

import pytest
import torch
import torch.nn.functional as F

from twoaxis.verify.golden import Case, NotRun, check
from twoaxis.verify.golden.registry import runners


def made(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 4])
def test_a_prompt_of_all_tokens_leaves_none_to_step(length):
    kernel, x, w = 3, made(2, length, 5), made(5, 1, 3)
    y = x + F.conv1d(F.pad(x.mT, (kernel - 1, 0)), w, groups=5).mT
    state = F.pad(x.mT, (kernel, 0))[..., -kernel:]
    params = {
        "B": 2,
        "T": length,
        "c": 5,
        "kernel": kernel,
        "prefill": length,
        "residual": True,
        "silu": False,
    }
    tensors = {"x": x, "w": w, "out": y, "out_cached": y, "state_after_prefill": state, "state_end": state}
    case = Case("canon/op", {"case": "op", "params": params}, tensors)
    runners()["canon"](case)
    result = check(case, "canon")
    assert (result.status, result.detail) == ("ok", "")


def values_of_one() -> Case:
    config = {"layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 2, "mask": "causal, additive"}
    return Case("value_residual/one", {"method": "SVFormer", "config": config}, {"in.x.0": made(1, 3, 4)})


def one_stream() -> Case:
    hyper = {"n": 1, "d": 3, "sinkhorn_iters": 2, "eps": 0.1}
    tensors = {"in.X": made(1, 2, 1, 3), "in.o": made(1, 2, 3), "param.fn": made(3, 3)}
    return Case("mhc/one", {"hyper": hyper}, tensors)


def one_channel() -> Case:
    tensors = {"in.x_emb": made(1, 2, 3), "param.conv.weight": made(3, 1, 2)}
    return Case("ddl/one", {"hyper": {"d": 3, "d_v": 1, "kernel": 2}}, tensors)


def odd_blocks() -> Case:
    meta = {"L": 2, "block_size_sublayers": 3, "eps": 1e-6}
    return Case("attnres_block/odd", meta, {"param.layers.0.attn_norm.weight": made(3), "x0": made(1, 2, 3)})


@pytest.mark.parametrize(
    ("family", "case", "why"),
    [
        ("value_residual", values_of_one, "nobody to share"),
        ("mhc", one_stream, "one stream is not mixed"),
        ("ddl", one_channel, "one value channel"),
        ("attnres_block", odd_blocks, "block_size_sublayers=3 ends inside a layer"),
    ],
    ids=["one attention", "one stream", "one channel", "odd blocks"],
)
def test_what_the_methods_do_not_have_is_not_run(family, case, why):
    with pytest.raises(NotRun, match=why):
        runners()[family](case())
