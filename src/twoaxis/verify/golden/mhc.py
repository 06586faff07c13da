"""Replay mHC: layers with a fixed sublayer output, a stack of linear sublayers, the read-out head, Sinkhorn.

A mixing takes part only between sublayers, so every layer is built in the middle of a network.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth import build
from twoaxis.depth.connection import Core
from twoaxis.depth.mhc import MHC, MHCStream
from twoaxis.ops import sinkhorn
from twoaxis.ops.stream_take import Taken
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.registry import golden

KNOWN = (
    *("B", "T", "d", "n", "eps", "norm_eps", "pre_eps", "post_mult", "sinkhorn_iters", "repeat", "sublayers"),
    *("tau", "ns_steps", "ns_eps", "ns_coeffs"),
)


@golden("mhc")
def replay(case: Case) -> None:
    """The kind of a case follows from its tensors."""
    case.only(case.meta["hyper"], KNOWN)
    if case.has("in.logits"):
        _sinkhorn(case)
    elif case.has("in.x"):
        _stack(case)
    elif case.has("param.hc_fn"):
        _head(case, _build(case, readout="head")[0], "param.", case.leaf("in.X"))
    elif case.has("out.mixes"):
        _gates(case)
    elif case.has("in.X") and case.has("in.o"):
        _layer(case)
    else:
        raise NotRun("neither a layer (in.X, in.o), a stack (in.x), a head nor logits")


def _build(case: Case, sublayers: int = 1, **options: Any) -> tuple[MHCStream, list[MHC]]:
    hyper = case.meta["hyper"]
    if hyper["n"] == 1:
        raise NotRun("one stream is not mixed: a recorded mixing of it has no parameters here")
    options = {"streams": hyper["n"], "eps": float(hyper.get("eps", hyper.get("pre_eps", 0.0))), **options}
    options |= {"write_scale": float(hyper["post_mult"])} if "post_mult" in hyper else {}
    if hyper.get("sinkhorn_iters") is not None:
        options["iterations"] = hyper["sinkhorn_iters"]
    norm_eps = float(hyper.get("norm_eps", 0.0))
    kinds = [["mlp"] * (sublayers + 2)]
    stream, (built,) = build(MHC.Config(**options), hyper["d"], kinds, norm_eps=norm_eps)
    connections = [c for c in built[1:-1] if isinstance(c, MHC)]
    assert isinstance(stream, MHCStream)
    for connection in connections:
        connection.norm = nn.Identity()  # the recorded sublayers have no pre-norm
    return stream, connections


def _sinkhorn(case: Case) -> None:
    """comb = H^T: its last axis is normalised first."""
    hyper = case.meta["hyper"]
    comb = sinkhorn(case.leaf("in.logits").mT, hyper["repeat"], eps=float(hyper["eps"])).mT
    case.output("out.comb", comb)


def _bind_deepseek(case: Case, connection: MHC, prefix: str) -> None:
    """fn rows are [read n | write n | comb n n], comb[s, t] = H[t, s]."""
    n = connection.cfg.streams
    fn, base = case.leaf(f"{prefix}fn"), case.leaf(f"{prefix}base")
    if case.has(f"{prefix}norm_weight"):
        fn = fn * case.leaf(f"{prefix}norm_weight")
    order = [*range(2 * n), *(2 * n + s * n + t for t in range(n) for s in range(n))]
    values = {"phi": fn[order].T, "bias": base[order], "scale": case.leaf(f"{prefix}scale")}
    case.bind(connection.coefficients, values)


def _gates(case: Case) -> None:
    _, (connection,) = _build(case)
    _bind_deepseek(case, connection, "param.")
    X, n = case.leaf("in.X"), connection.cfg.streams
    order = [*range(2 * n), *(2 * n + t * n + s for s in range(n) for t in range(n))]
    case.output("out.mixes", connection.coefficients.project(X)[..., order])
    P, Q, _ = connection.gates(X)
    case.output("out.pre", P.unsqueeze(-1))
    case.output("out.post", Q.unsqueeze(-1))
    case.output("out.res_logits", connection.coefficients(X)[2].unflatten(-1, (n, n)).mT)


def _head(case: Case, stream: MHCStream, prefix: str, X: Tensor) -> None:
    assert stream.head is not None
    values = {"phi": case.leaf(f"{prefix}hc_fn").T, "bias": case.leaf(f"{prefix}hc_base")}
    case.bind(stream.head, {**values, "scale": case.leaf(f"{prefix}hc_scale")})
    case.output("out.y", stream.readout(X))


def _stack(case: Case) -> None:
    layers = len({name.split(".")[1] for name in case.names("param.")} - {"head"})
    head = case.has("param.head.hc_fn")
    stream, connections = _build(case, layers, readout="head" if head else "sum")
    ctx = Context()
    state = stream.open(case.leaf("in.x"), ctx)
    for layer, connection in enumerate(connections):
        _bind_deepseek(case, connection, f"param.{layer}.")
        branch = (case.leaf(f"param.{layer}.branch.{name}") for name in ("weight", "bias"))
        state = connection(state, _linear(*branch), ctx)
    case.output("out.X_last", state)
    if head:
        _head(case, stream, "param.head.", state)
    else:
        case.output("out.y", stream.readout(state))


def _layer(case: Case) -> None:
    """One layer in any of the public parameterisations."""
    if case.has("param.fn"):
        _, (connection,) = _build(case)
        _bind_deepseek(case, connection, "param.")
    elif case.has("param.dynamic_alpha_fn"):
        connection = _lite(case)
    elif case.has("param.H_res_logits"):
        connection = _static(case)
    else:
        raise NotRun("no known parameters of a layer")
    ctx, X = Context(), case.leaf("in.X")
    reads, carry = connection.read(X, ctx)
    case.output("out.h_in", reads.x)
    case.output("out.X_next", connection.write(X, carry, case.leaf("in.o"), ctx))
    if case.has("out.comb"):
        Q, H = (carry.write, carry.mixing) if isinstance(carry, Taken) else carry
        assert H is not None
        case.output("out.H_post", Q)
        case.output("out.comb", H.mT)


def _lite(case: Case) -> MHC:
    """alpha[s, t] = H[t, s], so the rows of H are normalised first; 1 + gamma folds into phi."""
    n, width = case.meta["hyper"]["n"], case.leaf("in.X").shape[-1]
    b, fn, gamma = (case.leaf(f"param.{name}") for name in ("static_alpha", "dynamic_alpha_fn", "norm.gamma"))
    if len(gamma) != n * width:
        raise NotRun("coefficients from each stream alone (norm and projection of width d): not mHC's")
    if b.ndim == 1:  # read n | permutations n!
        _, (connection,) = _build(case, mixing="permutations")
        read, orders = list(range(n)), list(permutations(range(n)))
        rest = [n + orders.index(tuple(map(order.index, range(n)))) for order in orders]  # P^T, the inverse
    else:  # (s, 1 + n): read | alpha
        _, (connection,) = _build(case, last="columns")
        read = [s * (n + 1) for s in range(n)]
        rest = [s * (n + 1) + 1 + t for t in range(n) for s in range(n)]
    b, phi = b.flatten(), (1 + gamma)[:, None] * torch.cat((fn, case.leaf("param.dynamic_beta_fn")), 1)
    b = torch.cat((b, case.leaf("param.static_beta")))
    order = [*read, *range(fn.shape[1], fn.shape[1] + n), *rest]
    scales = (case.leaf(f"param.{name}_scale") for name in ("pre_branch", "h_post", "residual"))
    values = {"phi": phi[:, order], "bias": b[order], "scale": torch.cat([a.reshape(1) for a in scales])}
    case.bind(connection.coefficients, values)
    return connection


def _static(case: Case) -> MHC:
    """Softmax gates, and H[s, t] from old s to new t by Sinkhorn on logits / tau, t normalised first."""
    if "ortho" in str(case.meta["source"].get("ran")):
        raise NotRun("an orthostochastic mixing by Newton-Schulz steps is not in this version")
    _, (connection,) = _build(case, dynamic=False, gates="softmax", write_scale=1.0)
    R = case.leaf("param.H_res_logits").mT / float(case.meta["hyper"]["tau"])
    logits = [case.leaf("param.H_pre_logits"), case.leaf("param.H_post_logits"), R.flatten()]
    case.bind(connection.coefficients, {"bias": torch.cat(logits)})
    return connection


def _linear(weight: Tensor, bias: Tensor) -> Core:
    def core(reads: Reads, ctx: Context) -> Tensor:
        return F.linear(reads.x, weight, bias)

    return core
