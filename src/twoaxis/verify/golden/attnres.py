"""Attention Residuals: single reads, and full and block stacks of stand-in sublayers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twoaxis.depth import AttnRes, build
from twoaxis.depth.attnres import AttnResStream
from twoaxis.ops import depth_read, mix
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.registry import golden

ABOUT = ("dtype", "environment", "file", "loss_for_gradients", "ran", "semantics", "source", "tensors")


@golden("attnres_read")
def replay_read(case: Case) -> None:
    """One read through `ops.depth_read`, on all sources, a window, slices of the width, or in two phases."""
    case.only(case.meta, (*ABOUT, "eps", "scale", "heads", "window", "sink", "selected"))
    if case.has("phase1_out"):
        return _two_phase(case)
    sources = case.leaf("sources").unbind(0)
    if "window" in case.meta:
        n, sink = len(sources), bool(case.meta.get("sink"))
        recent = [i for i in range(n) if i >= n - case.meta["window"] or (sink and i == 0)]
        if case.meta.get("selected", recent) != recent:
            raise NotRun(f"selected={case.meta['selected']} is not a window with a sink")
        sources = tuple(sources[i] for i in recent)
    query, width = case.leaf("query"), sources[0].shape[-1]
    rank = query.shape[-1]  # below the width: keys are the last `rank` features, values stay whole
    keys = tuple(x[..., width - rank :] for x in sources)
    heads, eps = case.meta.get("heads", 1), case.meta["eps"]
    norm = case.leaf("output_norm_weight") if case.has("output_norm_weight") else None
    out, weights = depth_read(
        query,
        keys,
        key_gain=case.leaf("key_norm_weight") if case.has("key_norm_weight") else None,
        key_norm_eps=eps,
        scale=case.meta.get("scale", 1.0),
        heads=heads,
        output_gain=norm,
        output_eps=None if norm is None else eps,
        return_weights=True,
    )
    if rank < width:
        if norm is not None or heads > 1:
            raise NotRun("sliced keys with heads or an output norm")
        out = mix(sources, weights.unbind(-1))
    case.output("output", out)
    if case.has("weights"):
        case.output("weights", weights.movedim(-1, 0))


def _two_phase(case: Case) -> None:
    """All queries of a depth-block on the closed blocks, then each with its partial sum; and in one pass."""
    blocks, partials = case.leaf("blocks").unbind(0), case.leaf("partials").unbind(0)
    eps, merged, once, phase1 = case.meta["eps"], [], [], []

    def scores(query: Tensor, sources: tuple[Tensor, ...]) -> Tensor:
        _, logits = depth_read(query, sources, key_norm_eps=eps, normalize="none", return_weights=True)
        return logits  # (B, T, n)

    for i, query in enumerate(case.leaf("queries").unbind(0)):
        logits = scores(query, blocks)
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top).exp()
        total, out = weights.sum(-1), mix(blocks, weights.unbind(-1))
        phase1.append((out, top.squeeze(-1), total))
        seen = partials[i - 1 : i] if i else ()
        once.append(depth_read(query, blocks + seen, key_norm_eps=eps))
        out = out / total[..., None]
        if seen:  # sigmoid of the logit against the log-sum of the rest is its softmax weight
            rest = top + total.log()[..., None]
            out = out + (scores(query, seen) - rest).sigmoid() * (seen[0] - out)
        merged.append(out)
    for name, values in zip(("out", "max", "sumexp"), zip(*phase1, strict=True), strict=True):
        case.output(f"phase1_{name}", torch.stack(values))
    case.output("output", torch.stack(once))
    case.output("output", torch.stack(merged))


@golden("attnres_full")
def replay_full(case: Case) -> None:
    """A stack in which every sublayer output is a source."""
    _stack(case, None)


@golden("attnres_block")
def replay_block(case: Case) -> None:
    """A stack that reads sums over depth-blocks."""
    meta = case.meta
    _stack(case, meta.get("block_size_sublayers") or 2 * meta["layers_per_block"])


@dataclass(frozen=True)
class Dialect:
    """What a public code calls a sublayer's query, key gain, norm gain and matrix, and the read-out's."""

    sublayer: Callable[[int], tuple[str, ...]]
    final: tuple[str, ...] = ()
    readout: Literal["read", "sum"] = "read"


def _pair(norms: tuple[str, str], attention: str) -> Callable[[int], tuple[str, ...]]:
    def names(s: int) -> tuple[str, ...]:
        layer, kind = f"layers.{s // 2}", ("attn", "mlp")[s % 2]
        matrix = attention if kind == "attn" else "mlp"
        read = (f"{layer}.{kind}_res_proj.weight", f"{layer}.{kind}_res_norm.weight")
        return (*read, f"{layer}.{norms[s % 2]}.weight", f"{layer}.{matrix}.A")

    return names


FINAL = ("res_proj.weight", "res_norm.weight", "norm.weight")
DIALECTS = {
    "input_layernorm": Dialect(
        _pair(("input_layernorm", "post_attention_layernorm"), "self_attn"),
        ("final_res_proj.weight", "final_res_norm.weight", "norm.weight"),
    ),
    "attn_norm": Dialect(_pair(("attn_norm", "mlp_norm"), "attn"), FINAL),
    "attn_res": Dialect(
        lambda s: (f"layers.{s}.attn_res.pseudo_query", "", f"layers.{s}.norm.weight", f"layers.{s}.fn.A"),
        readout="sum",
    ),
}


def _stack(case: Case, block_sublayers: int | None) -> None:
    """Replayed in float64: the recordings' own rounding is then all that the bounds have to allow for."""
    meta, ctx = case.meta, Context()
    options = ("eps", "L", "sublayers", "layers_per_block", "block_size_sublayers")
    case.only(meta, (*ABOUT, "parameters_without_gradient", *options))
    known = [d for mark, d in DIALECTS.items() if case.names(f"param.layers.0.{mark}.")]
    if len(known) != 1:
        raise NotRun(f"unknown names of parameters: {', '.join(case.names('param.layers.0.'))}")
    if known[0] is DIALECTS["attn_norm"] and block_sublayers is not None and block_sublayers % 2:
        raise NotRun(f"block_size_sublayers={block_sublayers} ends inside a layer; allowed is 1 or even")
    dialect, n_sublayers = known[0], meta["sublayers"] if "sublayers" in meta else 2 * meta["L"]
    names = [dialect.sublayer(s) for s in range(n_sublayers)]
    expected = [f"param.{n}" for group in (*names, dialect.final) for n in group]
    case.only(dict.fromkeys(case.names("param.")), expected)
    config = AttnRes.Config(
        block_sublayers=block_sublayers,
        key_gain=bool(names[0][1]),
        key_norm_eps=meta["eps"],
        readout=dialect.readout,
        scale_eps=False,
    )
    x0 = case.leaf("x0").double()
    stream, blocks = build(config, x0.shape[-1], [["mlp"]] * n_sublayers, norm_eps=meta["eps"])
    assert isinstance(stream, AttnResStream)
    state, inputs = stream.open(x0, ctx), []
    for s, (connection,) in enumerate(blocks):
        assert isinstance(connection, AttnRes)
        *read, norm, matrix = names[s]
        _bind(case, connection, read, norm)
        inputs.append(connection.mixture(state))
        A = case.leaf(f"param.{matrix}").double()

        def stand_in(reads: Reads, ctx: Context, attention: bool = s % 2 == 0, A: Tensor = A) -> Tensor:
            y = reads.x @ A
            if attention:  # causal running mean
                y = y.cumsum(1) / torch.arange(1, y.shape[1] + 1, dtype=y.dtype)[:, None]
            return y.tanh()

        state = connection(state, stand_in, ctx)
    if case.has("sublayer_in"):
        case.output("sublayer_in", torch.stack(inputs))
    if dialect.readout == "sum":
        return case.output("output", stream.mixture(state))
    *read, norm = dialect.final
    _bind(case, stream, read, norm)
    case.output("output", stream.close(state, ctx))


def _bind(case: Case, module: AttnRes | AttnResStream, read: list[str], norm: str) -> None:
    """Give a connection or stream its weights. The first sublayer owns no read: the file's have no effect."""
    named = zip(("route.query", "route.key_gain"), read, strict=True)
    values = {name: case.leaf(f"param.{n}").flatten().double() for name, n in named if n}
    if module.route is None:
        values = {}
    case.bind(module, {**values, "norm.weight": case.leaf(f"param.{norm}").double()})
