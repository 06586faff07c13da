"""Replays of sliding-window attention: transformers (Mistral, gpt-oss) and lucidrains/local-attention.

Whatever a source calls its window, ours counts the current position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.ops import local_attention, rotate, visible
from twoaxis.sequence import ShortSWA
from twoaxis.sequence.rotary import rotary_angles
from twoaxis.types import Context, Layout, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.feed import documents, feed
from twoaxis.verify.golden.registry import golden

SHAPE = ("B", "D", "H", "Hq", "Hkv", "T", "scale")


@golden("sliding-window-attention")
def replay(case: Case) -> None:
    """Which code was run decides what its window number means."""
    name = str(case.meta.get("case"))
    if name.startswith("lucidrains"):
        lucidrains(case)
    elif name.startswith("hf_module"):
        module(case)
    elif name.startswith(("hf_core", "hf_packed", "gptoss_sink")):
        transformers(case)
    else:
        raise NotRun(f"unknown case {name!r}")


def transformers(case: Case) -> None:
    """q, k, v in, out (B, T, H, D): a plain window, packed documents, or a sink logit."""
    params = case.meta["params"]
    case.only(params, (*SHAPE, "w"))
    segments = case.value("document")[None] if case.has("document") else None
    if segments is not None:
        _check_documents(case.value("cu_seqlens"), segments[0])
    q, k, v = (case.leaf(name) for name in "qkv")
    sink = case.leaf("sink") if case.has("sink") else None
    out = local_attention(q, k, v, params["w"], scale=params["scale"], segments=segments, sink_logits=sink)
    case.output("out", out.transpose(1, 2))
    if case.has("visible"):
        case.output("visible", visible(q.shape[2], k.shape[2], params["w"]))


def lucidrains(case: Case) -> None:
    """Exact windows: a key at distance n is still seen, so ours is n * look_backward + 1. Else chunks of n."""
    params = case.meta["params"]
    case.only(params, (*SHAPE, "window_size", "look_backward", "exact_windowsize", "autopad", "rotary"))
    n, back = params["window_size"], params["look_backward"]
    q, k, v = (case.leaf(name) for name in "qkv")
    positions = torch.arange(q.shape[2])
    if params["rotary"]:  # of base 10000, by rates in float32, always
        exponents = torch.arange(0, q.shape[3], 2, dtype=torch.float32) / q.shape[3]
        angles = positions[:, None, None] * (1.0 / 10000.0**exponents).to(q.dtype)
        cos, sin = angles.cos(), angles.sin()
        q, k = (rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    if params["exact_windowsize"]:
        out = local_attention(q, k, v, n * back + 1, scale=params["scale"])
    else:  # the own chunk up to oneself, and `back` whole ones before
        reach = positions % n + 1 + n * back
        out = local_attention(q, k, v, n * (back + 1), scale=params["scale"], reach=reach)
    case.output("out", out)


def module(case: Case) -> None:
    """The short_swa mixer with rotary positions: all tokens at once, and in pieces through its cache."""
    params = case.meta["params"]
    known = ("w", "rope_theta", "feed_lengths", "cached_tokens_after_each_feed")
    case.only(params, (*SHAPE, *known))
    if params["scale"] != params["D"] ** -0.5:
        raise NotRun(f"unknown option 'scale' = {params['scale']!r}")
    x = case.leaf("x")
    heads = {"n_heads": params["Hq"], "n_kv_heads": params["Hkv"]}
    layout = Layout(d_model=x.shape[-1], blocks=(), rope_base=params["rope_theta"], **heads)
    text = f"short_swa(window={params['w']}, head_dim={params['D']})"
    core = ShortSWA(spec.parse_spec("sequence", text), layout, 0)
    qkv = torch.cat([case.leaf(f"w_{name}") for name in "qkv"])
    case.bind(core, {"qkv.weight": qkv, "out.weight": case.leaf("w_o")})
    case.output("out", core(Reads(x), Context()))
    case.output("out_cached", feed(core, x.detach(), params["feed_lengths"]))
    positions = torch.arange(x.shape[1])
    for name, half in zip(
        ("cos", "sin"), rotary_angles(positions, core.width, params["rope_theta"], x.dtype)
    ):
        case.output(name, torch.cat((half, half), -1).transpose(0, 1))


def _check_documents(starts: Tensor, given: Tensor) -> None:
    """The two descriptions of the documents in a packed file must agree."""
    if not torch.equal(torch.unique_consecutive(given, return_inverse=True)[1], documents(starts)):
        raise NotRun("cu_seqlens and document disagree")
