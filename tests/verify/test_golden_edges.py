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


@pytest.mark.parametrize(
    ("d", "heads", "kv_heads", "width", "window"),
    [(24, 2, 2, 4, 3), (10, 2, 1, 6, 2), (12, 3, 1, 4, 4)],
    ids=["narrow heads", "wide heads", "heads of d / H"],
)
def test_a_window_over_heads_of_any_width(d, heads, kv_heads, width, window):
    T, x = 7, made(1, 7, d)
    weights = {
        f"w_{n}": made(h * width, d) / d for n, h in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
    }
    weights["w_o"] = made(d, heads * width)
    rates = 500.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.cat((torch.arange(T, dtype=torch.float64)[:, None] * rates,) * 2, -1)

    def turned(name):
        h = (x @ weights[name].T).unflatten(-1, (-1, width)).transpose(1, 2)
        first, second = h.chunk(2, -1)
        return h * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    v = (x @ weights["w_v"].T).unflatten(-1, (-1, width)).transpose(1, 2)
    k, v = (h.repeat_interleave(heads // kv_heads, 1) for h in (turned("w_k"), v))
    scores = turned("w_q") @ k.mT / width**0.5
    seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - window)
    y = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2) @ weights["w_o"].T
    params = {"B": 1, "D": width, "Hkv": kv_heads, "Hq": heads, "T": T, "scale": width**-0.5, "w": window}
    params |= {"feed_lengths": [2, 1, 4], "rope_theta": 500.0}
    recorded = {"cos": angles.cos()[None], "sin": angles.sin()[None], "out": y, "out_cached": y}
    case = Case("swa/module", {"case": "hf_module", "params": params}, {"x": x, **weights, **recorded})
    runners()["sliding-window-attention"](case)
    result = check(case, "sliding-window-attention")
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
