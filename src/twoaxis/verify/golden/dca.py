"""Replays of lucidrains/deep-cross-attention: one GRN, one block, a whole model."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth.connection import Connection, build
from twoaxis.depth.dca import DCA, DCAStream
from twoaxis.depth.grn import GRN
from twoaxis.depth.history import History
from twoaxis.ops import local_attention
from twoaxis.types import Context, Layout, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.registry import golden

CONTEXT = Context()


@golden("dca")
def replay(case: Case) -> None:
    """Which of the three it is follows from the tensors."""
    if case.has("param.w"):
        grn(case)
    elif case.has("in.G"):
        block(case)
    else:
        model(case)


def grn(case: Case) -> None:
    """Sources in, one or three reads out."""
    config = case.meta["config"]
    case.only(config, ("sources", "outputs", "rms_eps"))
    sources = case.leaf("in.G").unbind(0)
    options = spec.parse_spec("depth", "dca(gate_norm=True)")
    layout = Layout(d_model=sources[0].shape[-1], blocks=(), norm_eps=_eps(case))
    reader = GRN(options, layout, config["sources"], config["outputs"])
    names = {"b": "param.b", "w": "param.w", "gain": "param.norm_gain"}
    case.bind(reader, {ours: case.leaf(theirs) for ours, theirs in names.items()})
    reads = reader(History(sources, tuple(range(len(sources)))))
    case.output("out.g", reads[0] if len(reads) == 1 else torch.stack(reads))


def block(case: Case) -> None:
    """The sources before a block in, the branch it appends out."""
    config = case.meta["config"]
    case.only(config, ("heads", "head_dim", "sources", "position_encoding", "rms_eps"))
    sources = case.leaf("in.G").unbind(0)
    n = len(sources)
    _, blocks = build(
        "dca(gate_norm=True)", sources[0].shape[-1], [["attention", "mlp"]] * n, norm_eps=_eps(case)
    )
    before = {"sources": History(sources, tuple(range(n)))}
    after = _run_block(case, blocks[-1], before, "param.")
    case.output("out.f", after["sources"].sources[-1])
    first = blocks[-1][0]
    assert isinstance(first, DCA)
    assert first.grn is not None
    case.output("rec.qkv", torch.stack(first.grn(before["sources"])))


def model(case: Case) -> None:
    """Tokens in; every branch, the read-out and the logits out."""
    config = case.meta["config"]
    case.only(config, ("depth", "k", "heads", "head_dim", "position_encoding", "rms_eps"))
    table, depth = case.leaf("param.token_emb.weight"), config["depth"]
    name = f"dca(k={config['k']}, middle='drop', gate_norm=True)"
    stream, blocks = build(name, table.shape[1], [["attention", "mlp"]] * depth, norm_eps=_eps(case))
    _bind_grn(case, stream, "param.final_grn.")
    case.bind(stream, {"norm.weight": case.leaf("param.norm.weight")})
    state = stream.open(table[case.value("in.ids")], CONTEXT)
    for i, connections in enumerate(blocks):
        state = _run_block(case, connections, state, f"param.dca_blocks.{i}.")
        case.output(f"out.f.{i + 1}", state["sources"].sources[-1])
    assert isinstance(stream, DCAStream)
    case.output("out.readout", stream.mixture(state))
    case.output("out.logits", stream.close(state, CONTEXT) @ case.leaf("param.to_logits.weight").T)


def _run_block(case: Case, connections: list[Connection], state: Any, prefix: str) -> Any:
    """One block of this library's connections, with the file's attention and feed-forward as cores."""
    first, second = connections
    _bind_grn(case, first, f"{prefix}qkv_grn.")
    norms = {"norm": "q", "key_norm": "k", "value_norm": "v"}
    case.bind(first, {f"{n}.weight": case.leaf(f"{prefix}attn.to_{x}.0.weight") for n, x in norms.items()})
    case.bind(second, {"norm.weight": case.leaf(f"{prefix}pre_ff_norm.weight")})
    state = first(state, lambda reads, ctx: _attention(case, prefix, reads), CONTEXT)
    if case.has("rec.attn_out"):
        case.output("rec.attn_out", state["branch"])
    return second(state, lambda reads, ctx: _feed_forward(case, prefix, reads.x), CONTEXT)


def _bind_grn(case: Case, owner: nn.Module, prefix: str) -> None:
    names = {"b": "bias", "gain": "to_aggregate.0.weight", "w": "to_aggregate.1.weight"}
    case.bind(owner, {f"grn.{ours}": case.leaf(prefix + theirs) for ours, theirs in names.items()})


def _eps(case: Case) -> float:
    """The norms' epsilon, a number in a sentence: the machine epsilon of the dtype."""
    said = str(case.meta["config"].get("rms_eps"))
    found = re.search(r"\d[\d.]*e-\d+", said)
    if found is None:
        raise NotRun(f"unknown option 'rms_eps' = {said!r}")
    return float(found[0])


def _attention(case: Case, prefix: str, reads: Reads) -> Tensor:
    """Full causal attention without positions, heads of any width."""
    width, out = case.meta["config"]["head_dim"], case.leaf(f"{prefix}attn.to_out.weight")
    inputs = zip("qkv", (reads.x, reads.key, reads.value), strict=True)
    parts = [F.linear(_given(x), case.leaf(f"{prefix}attn.to_{name}.1.weight")) for name, x in inputs]
    q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)  # (B, H, T, D)
    if q.shape[1] != case.meta["config"]["heads"]:
        raise NotRun(f"unknown option 'heads' = {case.meta['config']['heads']!r}")
    return F.linear(local_attention(q, k, v, None).transpose(1, 2).flatten(2), out)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None, "DCA gives keys and values inputs of their own"
    return x


def _feed_forward(case: Case, prefix: str, x: Tensor) -> Tensor:
    w1, b1, w2, b2 = (case.leaf(f"{prefix}ff.{i}.{kind}") for i in (0, 2) for kind in ("weight", "bias"))
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
