"""Replays of sliding-window attention: transformers (Mistral, gpt-oss) and lucidrains/local-attention.

Whatever a source calls its window, ours counts the current position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.cache import Cache
from twoaxis.ops import local_attention, visible
from twoaxis.sequence import ShortSWA
from twoaxis.sequence.rotary import rotary_angles
from twoaxis.types import Context, Layout, Reads
from twoaxis.verify.golden.case import Case, NotRun
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
    """Exact windows: a key at distance n is still seen, so ours is n * look_backward + 1."""
    params = case.meta["params"]
    case.only(params, (*SHAPE, "window_size", "look_backward", "exact_windowsize", "autopad", "rotary"))
    if not params["exact_windowsize"]:
        raise NotRun("block mode: the number of keys varies with the position, which no window expresses")
    if params["rotary"]:
        raise NotRun("rotary inside the operator: positions belong to the mixers here")
    window = params["window_size"] * params["look_backward"] + 1
    q, k, v = (case.leaf(name) for name in "qkv")
    case.output("out", local_attention(q, k, v, window, scale=params["scale"]))


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
    core = ShortSWA(spec.parse_spec("sequence", f"short_swa(window={params['w']})"), layout, 0)
    if core.width != params["D"]:
        raise NotRun(f"head width {params['D']} with {params['Hq']} heads is not d = {layout.d_model}")
    qkv = torch.cat([case.leaf(f"w_{name}") for name in "qkv"])
    case.bind(core, {"qkv.weight": qkv, "out.weight": case.leaf("w_o")})
    case.output("out", core(Reads(x), Context()))
    case.output("out_cached", _in_pieces(core, x.detach(), params["feed_lengths"]))
    positions = torch.arange(x.shape[1])
    for name, half in zip(
        ("cos", "sin"), rotary_angles(positions, core.width, params["rope_theta"], x.dtype)
    ):
        case.output(name, torch.cat((half, half), -1).transpose(0, 1))


def _in_pieces(core: ShortSWA, x: Tensor, lengths: list[int]) -> Tensor:
    slot = core.new_slot(x.shape[0], None, 0, x.dtype, x.device)
    cache = Cache({core.slot_name: slot}, x.shape[0])
    pieces = []
    for piece in x.split(lengths, dim=1):
        cache.begin(piece.shape[1], None, None)
        pieces.append(core(Reads(piece), Context(cache=cache)))
        cache.advance(piece.shape[1])
    return torch.cat(pieces, dim=1)


def _check_documents(starts: Tensor, documents: Tensor) -> None:
    """The two descriptions of the documents in a packed file must agree."""
    ids = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    if not torch.equal(torch.unique_consecutive(documents, return_inverse=True)[1], ids):
        raise NotRun("cu_seqlens and document disagree")
