"""Replay Deep Delta Learning: rewrites, compressors, the embedding convolution, blocks and whole models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn

from twoaxis.depth import DDL, build
from twoaxis.depth.ddl_compress import DDLStream
from twoaxis.types import Context
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.ddl_model import Backbone, fed, weight
from twoaxis.verify.golden.registry import golden

KNOWN = (
    *("B", "T", "d", "d_v", "k_eps", "effective_k_eps", "v_mode", "v_sigmoid_scale", "v_const", "gate"),
    *("kernel", "embed_kernel", "norm_eps", "vocab", "L", "n_head", "head_dim", "rope_base", "mlp_hidden"),
)
MODES = ("scale*sigmoid(linear)", "linear", "constant")
GATES = ("single linear", "two-layer tanh")
COMPRESSORS = {"weight": "channel", "shortconv.weight": "token"}


@golden("ddl")
def replay(case: Case) -> None:
    """The kind of a case follows from its inputs."""
    case.only(case.meta["hyper"], KNOWN)
    kinds: dict[str, Callable[[Case], None]] = {
        "in.c": _rewrite,
        "in.h_attn": _block,
        "in.idx": _model,
        "in.x_emb": _embed,
        "in.X": _compress,
    }
    for name, run in kinds.items():
        if case.has(name):
            return run(case)
    raise NotRun(f"none of {', '.join(kinds)} is in the file")


def _rewrite(case: Case) -> None:
    scalar = case.has("in.x")
    state = case.leaf("in.x" if scalar else "in.X")
    u = state if scalar else case.leaf("in.x_in")
    _, connections = _build(case, _options(case, "param.", 1 if scalar else state.shape[-1]), u.shape[-1])
    _bind_rewrite(case, connections[0], "param.")
    control = connections[0].control(u, case.leaf("in.c"))
    out = connections[0].write(state, control, case.leaf("in.h"), Context())
    case.output("out.x_next" if scalar else "out.X_next", out)


def _block(case: Case) -> None:
    X = case.leaf("in.X")
    expanded = X.ndim == 4
    options = _options(case, "param.ddl_attn.", X.shape[-1] if expanded else 1)
    options |= _compressor(case, "param.compress.") if expanded else {}
    _, connections = _build(case, options, X.shape[2])
    _bind_block(case, connections, "param.")
    for connection, name in zip(connections, ("attn", "mlp"), strict=True):
        reads, control = connection.read(X, Context())
        case.output(f"out.c_{name}", reads.x)
        X = connection.write(X, control, case.leaf(f"in.h_{name}"), Context())
    case.output("out.X_next", X)


def _compress(case: Case) -> None:
    X = case.leaf("in.X")
    options = {"value_dim": X.shape[-1], **_compressor(case, "param.")}
    stream, _ = _build(case, options, X.shape[2])
    _bind(case, stream, {f"compress.{to}": f"param.{name}" for to, name in _compressor_names(case, "param.")})
    case.output("out.x_in", stream.readout(X, Context()))
    if case.has("out.decode_x_in"):
        first = int((re.search(r"prefill of (\d+)", _meaning(case, "out.decode_x_in")) or ["", "4"])[1])
        chunks = X.split((first, 1, max(0, X.shape[1] - first - 1)), 1)
        outputs, states = fed(case, stream, chunks, stream.readout, "memory")
        case.output("out.decode_x_in", outputs)
        case.output("out.decode_state_after_prefill", states[0])
        case.output("out.decode_state_end", states[-1])


def _embed(case: Case) -> None:
    x = case.leaf("in.x_emb")
    rows, _, kernel = case.leaf("param.conv.weight").shape
    if rows == x.shape[-1]:
        raise NotRun("an embedding convolution into one value channel is not in this version")
    stream, _ = _build(case, {"value_dim": rows // x.shape[-1], "embed_kernel": kernel}, x.shape[-1])
    _bind(case, stream, {"expand.weight": "param.conv.weight"})
    case.output("out.X0", stream.open(x, Context()))
    if case.has("out.decode_X0"):
        chunks = x.split((1, 1, x.shape[1] - 2), 1)
        outputs, states = fed(case, stream, chunks, stream.open, "expand.memory")
        case.output("out.decode_X0", outputs)
        case.output("out.decode_state_after_1", states[0])
        case.output("out.decode_state_end", states[-1])


def _model(case: Case) -> None:
    hyper, table = case.meta["hyper"], case.leaf("param.transformer.wte.weight")
    layers = len({name.split(".")[3] for name in case.names("param.transformer.h.")})
    expanded = case.has("param.readout.read")
    channels = case.leaf("param.readout.read").shape[0] if expanded else 1
    options = _options(case, "param.transformer.h.0.ddl_attn.", channels)
    if expanded:
        options |= _compressor(case, "param.readout.")
        options["embed_conv"] = case.has("param.input_embed.conv.weight")
        if options["embed_conv"]:
            options["embed_kernel"] = case.leaf("param.input_embed.conv.weight").shape[-1]
    stream, connections = _build(case, options, table.shape[1], layers)
    names = {"norm.weight": "param.ln_f.weight"}
    if expanded:
        names |= {
            f"compress.{to}": f"param.readout.{n}" for to, n in _compressor_names(case, "param.readout.")
        }
    if options.get("embed_conv"):
        names["expand.weight"] = "param.input_embed.conv.weight"
    _bind(case, stream, names)
    for layer in range(layers):
        prefix = f"param.transformer.h.{layer}."
        _bind_block(case, connections[2 * layer : 2 * layer + 2], prefix)
    model = Backbone(case, stream, connections, hyper.get("rope_base", 10000.0), hyper.get("norm_eps", 1e-5))
    tokens = case.value("in.idx")
    logits, hidden = model(tokens, Context())
    case.output("out.logits", logits)
    for depth, x in enumerate(hidden):
        case.output(f"out.hidden_{depth}", x)
    loss = F.cross_entropy(logits.flatten(0, 1), case.value("in.targets").flatten())
    case.output("out.loss", loss.reshape(1))
    if case.has("out.decode_logits"):
        first = int((re.search(r"prefill (\d+) tokens", str(case.meta.get("semantics"))) or ["", "4"])[1])
        chunks = tokens.split((first, *[1] * (tokens.shape[1] - first)), 1)
        case.output("out.decode_logits", fed(case, model, chunks, lambda t, ctx: model(t, ctx)[0])[0])


def _options(case: Case, prefix: str, channels: int) -> dict[str, Any]:
    """The options of the rewrite, from the JSON and the shapes."""
    hyper = case.meta["hyper"]
    mode, gate = hyper.get("v_mode", MODES[0]), hyper.get("gate", GATES[0])
    if mode not in MODES or gate not in GATES:
        raise NotRun(f"unknown option 'v_mode' = {mode!r} or 'gate' = {gate!r}")
    options: dict[str, Any] = {"value_dim": channels, "key_eps": float(hyper["k_eps"])}
    if "accelerated" in str(case.meta["source"].get("file")):  # the fused file enlarges eps by sqrt(d)
        options["key_eps"] *= math.sqrt(case.leaf(f"{prefix}v_proj.weight").shape[1])
    if hyper.get("v_const") is not None:
        options["target_const"] = float(hyper["v_const"])
    elif mode == "linear":
        options["target_act"] = "linear"
    else:
        options["target_scale"] = float(hyper.get("v_sigmoid_scale", 4.0))
    if case.has(f"{prefix}beta_in.weight"):
        options |= {"gate": "mlp", "gate_hidden": case.leaf(f"{prefix}beta_in.weight").shape[0]}
    return options


def _compressor_names(case: Case, prefix: str) -> list[tuple[str, str]]:
    """(our parameter, the file's) of a compressor."""
    found = [name for name in COMPRESSORS if case.has(prefix + name)]
    if len(found) != 1:
        raise NotRun(f"{prefix}* is neither a channel nor a token compressor")
    return [("weight", found[0]), ("read", "read")]


def _compressor(case: Case, prefix: str) -> dict[str, Any]:
    (_, name), _ = _compressor_names(case, prefix)
    return {"compressor": COMPRESSORS[name], "kernel": case.leaf(prefix + name).shape[-1]}


def _build(case: Case, options: dict[str, Any], width: int, layers: int = 1) -> tuple[DDLStream, list[DDL]]:
    norm_eps = float(case.meta["hyper"].get("norm_eps", 1e-5))
    blocks = [["attention", "mlp"]] * layers
    stream, built = build(DDL.Config(**options), width, blocks, norm_eps=norm_eps)
    connections = [c for block in built for c in block if isinstance(c, DDL)]
    assert isinstance(stream, DDLStream)
    return stream, connections


def _bind(case: Case, module: nn.Module, names: Mapping[str, str]) -> None:
    """Bind parameters to leaves; where only the shape differs (rows i*m+j for [i, j]) it is ours."""
    for ours, theirs in names.items():
        case.bind(module, {ours: weight(case, theirs).reshape(module.get_parameter(ours).shape)})


def _bind_rewrite(case: Case, connection: DDL, prefix: str) -> None:
    if connection.gate_in is None:
        names = {"gate.weight": "beta.weight", "gate.bias": "beta.bias"}
    else:
        names = {
            "gate_in.weight": "beta_in.weight",
            "gate.weight": "beta_out.weight",
            "gate.bias": "beta_out.bias",
        }
    target = {"target.weight": "v_proj.weight", "target.bias": "v_proj.bias"}
    if connection.target is not None:
        names |= target
    else:
        for name in target.values():  # a constant target: there, unused, with zero gradients
            case.leaf(prefix + name)
    _bind(case, connection, {ours: prefix + theirs for ours, theirs in names.items()})


def _bind_block(case: Case, connections: list[DDL], prefix: str) -> None:
    for connection, kind, norm in zip(connections, ("attn", "mlp"), ("ln_1", "ln_2"), strict=True):
        _bind_rewrite(case, connection, f"{prefix}ddl_{kind}.")
        _bind(case, connection, {"norm.weight": f"{prefix}{norm}.weight"})
    if connections[0].compress is not None:
        names = _compressor_names(case, f"{prefix}compress.")
        _bind(case, connections[0], {f"compress.{to}": f"{prefix}compress.{name}" for to, name in names})


def _meaning(case: Case, name: str) -> str:
    return str(case.meta["tensors"][name].get("meaning"))
