"""Replay short convolutions: Dao-AILab/causal-conv1d, LFM2's sublayer, token shift, states of packed documents.

Recordings have channels first (B, c, T); ours come last.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis import spec
from twoaxis.ops import depthwise_causal_conv
from twoaxis.sequence import Mixer
from twoaxis.types import Context, Layout, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.feed import cache_of, documents, feed, newest
from twoaxis.verify.golden.registry import golden


@golden("shortconv")
def replay(case: Case) -> None:
    """The case's name says which code was run."""
    name = str(case.meta.get("case"))
    runs = {
        "causal_conv": convolution,
        "lfm2_block": lfm2,
        "token_shift": token_shift,
        "varlen_states": varlen_states,
    }
    for start, run in runs.items():
        if name.startswith(start):
            return run(case)
    raise NotRun(f"unknown case {name!r}")


def convolution(case: Case) -> None:
    """The `short_conv` mixer at once and fed in pieces; an initial state is what its memory holds before."""
    params = case.meta["params"]
    case.only(params, ("B", "T", "c", "feeds", "kernel", "ring_feeds", "ring_slots", "silu"))
    x, kernel = case.leaf("x").mT, params["kernel"]
    act = "silu" if params["silu"] else "none"
    core = _core(f"short_conv(kernel={kernel}, activation={act!r}, bias={case.has('b')})", x.shape[-1])
    names = {"conv.weight": "w", **({"conv.bias": "b"} if case.has("b") else {})}
    case.bind(core, {path: case.leaf(name) for path, name in names.items()})
    before = case.leaf("h0").mT if case.has("h0") else x[:, :0]  # (B, K-1, c)
    if case.has("h0"):
        y = depthwise_causal_conv(x, case.leaf("w"), history=before)
        y = y + case.leaf("b") if case.has("b") else y
        case.output("out", (F.silu(y) if params["silu"] else y).mT)
    else:
        case.output("out", core(Reads(x), Context()).mT)
    case.output("state", newest(torch.cat((before, x), 1), kernel - 1))
    _fed(case, core, x.detach(), before.detach(), kernel)
    if case.has("ring_end"):
        case.output("ring_end", _ring(core, x.detach(), params["ring_feeds"], params["ring_slots"], kernel))


def _fed(case: Case, core: Mixer, x: Tensor, before: Tensor, kernel: int) -> None:
    cache = cache_of(core, x)
    (slot,) = cache.slots.values()
    if before.shape[1]:
        slot.append(u=before)
        cache.advance(before.shape[1])
    case.output("out_fed", feed(core, x, case.meta["params"]["feeds"], cache).mT)
    case.output("state_fed", newest(slot.entries()["u"], kernel - 1))


def _ring(core: Mixer, x: Tensor, feeds: list[int], slots: int, kernel: int) -> Tensor:
    """The ring (B, c, slots) after all feeds: the input of position p lies at place p mod slots."""
    if slots < kernel:
        raise NotRun(f"a ring of {slots} slots holds no {kernel} inputs")
    cache = cache_of(core, x, max_rollback=slots - kernel)
    (slot,) = cache.slots.values()
    feed(core, x, feeds, cache)
    rows = slot.entries()["u"]
    places = torch.arange(x.shape[1] - rows.shape[1], x.shape[1]) % slots
    return x.new_zeros(x.shape[0], slots, x.shape[2]).index_copy(1, places, rows).mT


def lfm2(case: Case) -> None:
    """`short_conv(form="lfm2")`, at once and in pieces."""
    params = case.meta["params"]
    case.only(params, ("B", "T", "d", "bias", "feeds", "kernel"))
    x = case.leaf("x")
    core = _core(
        f"short_conv(form='lfm2', kernel={params['kernel']}, bias={bool(params['bias'])})", x.shape[-1]
    )
    values = {"conv.weight": case.leaf("w.conv.weight").squeeze(1)}
    values |= {"into.weight": case.leaf("w.in_proj.weight"), "out.weight": case.leaf("w.out_proj.weight")}
    if params["bias"]:
        theirs = {"conv": "conv", "into": "in_proj", "out": "out_proj"}
        values |= {f"{ours}.bias": case.leaf(f"w.{name}.bias") for ours, name in theirs.items()}
    case.bind(core, values)
    case.output("out", core(Reads(x), Context()))
    case.output("out_fed", feed(core, x.detach(), params["feeds"]))


def token_shift(case: Case) -> None:
    """The recorded delta is what the `token_shift` mixer adds to its input at mu = 1."""
    case.only(case.meta["params"], ("B", "T", "c"))
    x, packed = case.leaf("x"), case.value("x_packed")
    core = _core("token_shift(mu=1.0)", x.shape[-1]).to(x.dtype)
    case.output("out", core(Reads(x), Context()) - x)
    case.output("out", feed(core, x.detach(), [1] * x.shape[1]) - x)
    segments = documents(case.value("cu_seqlens"))[None]
    case.output("out_packed", core(Reads(packed), Context(segments)) - packed)


def varlen_states(case: Case) -> None:
    """Each document's last inputs, (docs, c, K), by K convolutions with a single tap at the documents' ends."""
    params = case.meta["params"]
    case.only(params, ("lengths", "state_len"))
    x, starts = case.value("x")[None], case.value("cu_seqlens")
    if starts.diff().tolist() != params["lengths"]:
        raise ValueError("cu_seqlens and lengths disagree")
    taps = torch.eye(params["state_len"], dtype=x.dtype)
    segments, ends = documents(starts)[None], starts[1:] - 1
    rows = [depthwise_causal_conv(x, tap.expand(x.shape[-1], -1), segments=segments)[0, ends] for tap in taps]
    case.output("state", torch.stack(rows, -1))


def _core(text: str, width: int) -> Mixer:
    cfg = spec.parse_spec("sequence", text)
    core: Mixer = spec.method("sequence", cfg.name)(cfg, Layout(d_model=width, blocks=()), 0)
    return core
