"""Delta Attention Residuals over stand-in sublayers: the per-sublayer form and the block form as released."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from twoaxis.depth import DeltaAttnRes, build
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.registry import golden

ABOUT = ("dtype", "environment", "file", "loss_for_gradients", "ran", "semantics", "source", "tensors")
NORMS = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}
CONTEXT = Context()


@golden("delta_attnres")
def replay(case: Case) -> None:
    """Every sublayer's input and the output, in float64: bounds are for the recordings' own rounding."""
    meta = case.meta
    case.only(meta, (*ABOUT, "parameters_without_gradient", "L", "eps", "layers_per_block"))
    config = _config(case)
    layers = [f"param.layers.{i}." for i in range(meta["L"])]
    known = [f"{layer}{name}" for layer in layers for kind in NORMS for name in _names(kind, config)]
    case.only(dict.fromkeys(case.names("param.")), [*known, "param.norm.weight"])
    x0 = case.leaf("x0").double()
    stream, blocks = build(config, x0.shape[-1], [["attention", "mlp"]] * meta["L"], norm_eps=meta["eps"])
    state, inputs = stream.open(x0, CONTEXT), []
    for layer, connections in zip(layers, blocks, strict=True):
        for connection, kind in zip(connections, NORMS, strict=True):
            assert isinstance(connection, DeltaAttnRes)
            A = _bind(case, connection, layer, kind)
            inputs.append(connection.mixture(state))

            def stand_in(reads: Reads, ctx: Context, mean: bool = kind == "attn", A: Tensor = A) -> Tensor:
                y = reads.x @ A
                if mean:  # causal running mean
                    y = y.cumsum(1) / torch.arange(1, y.shape[1] + 1, dtype=y.dtype)[:, None]
                return y.tanh()

            state = connection(state, stand_in, CONTEXT)
    case.output("sublayer_in", torch.stack(inputs))
    case.bind(stream, {"norm.weight": case.leaf("param.norm.weight").double()})
    case.output("output", stream.close(state, CONTEXT))


def _config(case: Case) -> DeltaAttnRes.Config:
    """The mode, which the JSON names in what it says was run."""
    ran = str(case.meta.get("ran"))
    mode = re.search(r"attnres_mode='(\w+)'", ran)
    null = re.search(r"null_source=(True|False)", ran)
    options = {"key_norm_eps": case.meta["eps"], "null_source": bool(null and null[1] == "True")}
    if mode and mode[1] == "delta":
        return DeltaAttnRes.Config(**options)
    if mode and mode[1] == "delta_block":
        blocks = case.meta["layers_per_block"]
        return DeltaAttnRes.Config(form="block", released=True, source_blocks=blocks, **options)
    raise NotRun(f"unknown mode in {ran!r}")


def _names(kind: str, config: DeltaAttnRes.Config) -> list[str]:
    matrix = "self_attn.A" if kind == "attn" else "mlp.A"
    names = [f"{kind}_res_proj.weight", f"{kind}_res_norm.weight", f"{NORMS[kind]}.weight", matrix]
    return [*names, f"{kind}_null_source"] if config.null_source else names


def _bind(case: Case, connection: DeltaAttnRes, layer: str, kind: str) -> Tensor:
    """Give a connection its weights, as far as it reads; returns the sublayer's matrix."""
    query, gain, norm, A, *null = (case.leaf(layer + name).double() for name in _names(kind, connection.cfg))
    values = {"norm.weight": norm}
    if connection.route is not None and connection.route.query is not None:
        values |= {"route.query": query.flatten(), "route.key_gain": gain}
    if null:
        values["route.null"] = null[0]
    case.bind(connection, values)
    return A
