"""Replay Hyper-Connections: one layer with a fixed sublayer output, and a stack of linear sublayers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth import build
from twoaxis.depth.connection import Connection, Core
from twoaxis.depth.hyper_connections import HyperConnections, HyperStream
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.registry import golden

KNOWN = ("B", "T", "d", "n", "sublayers", "activation")


@golden("hc")
def replay(case: Case) -> None:
    """`layer*`: in.H, in.o -> out.h0, out.H_mix, out.H_next. `stack*`: in.x -> out.H_last, out.y."""
    case.only(case.meta["hyper"], KNOWN)
    if case.has("in.H"):
        _layer(case)
    elif case.has("in.x"):
        _stack(case)
    else:
        raise NotRun("neither a layer (in.H) nor a stack (in.x)")


def _build(
    case: Case, streams: int, width: int, sublayers: int, dynamic: bool
) -> tuple[HyperStream, list[Connection]]:
    activation = case.meta["hyper"].get("activation", "tanh")
    if activation not in ("tanh", "identity"):
        raise NotRun(f"unknown option 'activation' = {activation!r}")
    options = f", norm='rms', tanh={activation == 'tanh'}" if dynamic else ", dynamic=False"
    stream, (connections,) = build(
        f"hyper_connections(streams={streams}{options})", width, [["mlp"] * sublayers]
    )
    assert isinstance(stream, HyperStream)
    for connection in connections:
        assert isinstance(connection, HyperConnections)
        connection.norm = nn.Identity()  # the recorded sublayers have no pre-norm
    return stream, connections


def _layer(case: Case) -> None:
    H, o = case.leaf("in.H"), case.leaf("in.o")
    dynamic = case.has("param.W_r")
    _, (connection,) = _build(case, H.shape[2], H.shape[3], 1, dynamic)
    values = {"static": _columns(*(case.leaf(f"param.{name}") for name in ("A_m", "A_r", "B")))}
    if dynamic:
        values["dynamic"] = _columns(*(case.leaf(f"param.{name}") for name in ("W_m", "W_r", "W_beta")))
        values |= {name: case.leaf(f"param.{name}").reshape(()) for name in ("s_alpha", "s_beta")}
        values["gain"] = case.leaf("param.g")
    case.bind(connection, values)
    ctx = Context()
    reads, carry = connection.read(H, ctx)
    case.output("out.h0", reads.x)
    if case.has("out.H_mix"):
        case.output("out.H_mix", connection.write(H, carry, torch.zeros_like(o), ctx))
    case.output("out.H_next", connection.write(H, carry, o, ctx))


def _stack(case: Case) -> None:
    x = case.leaf("in.x")
    sublayers = len({name.split(".")[1] for name in case.names("param.")})
    dynamic = case.has("param.0.dynamic_alpha_fn")
    streams = case.leaf("param.0.static_beta").shape[0]
    stream, connections = _build(case, streams, x.shape[-1], sublayers, dynamic)
    ctx = Context()
    state = stream.open(x, ctx)
    for layer, connection in enumerate(connections):

        def param(name: str, layer: int = layer) -> Tensor:
            return case.leaf(f"param.{layer}.{name}")

        values = {"static": _columns(param("static_alpha"), param("static_beta"))}
        if dynamic:
            values["dynamic"] = _columns(param("dynamic_alpha_fn"), param("dynamic_beta_fn"))
            values["s_alpha"] = param("dynamic_alpha_scale").reshape(())
            values["s_beta"] = param("dynamic_beta_scale").reshape(())
            values["gain"] = param("norm.gamma")
        case.bind(connection, values)
        state = connection(state, _linear(param("branch.weight"), param("branch.bias")), ctx)
    case.output("out.H_last", state)
    case.output("out.y", stream.readout(state))


def _linear(weight: Tensor, bias: Tensor) -> Core:
    def core(reads: Reads, ctx: Context) -> Tensor:
        return F.linear(reads.x, weight, bias)

    return core


def _columns(*parts: Tensor) -> Tensor:
    """Vectors and matrices side by side, as the packed parameters hold them."""
    return torch.cat([p if p.ndim == 2 else p[:, None] for p in parts], 1)
