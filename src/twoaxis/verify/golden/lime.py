"""LIMe: one router, a chain of attentions that share their keys and values, and the mix of hidden states."""

from __future__ import annotations

import torch
from torch import nn

from twoaxis.depth import LIMe, build
from twoaxis.depth.history import History
from twoaxis.depth.lime_dynamic import DynamicLIMe
from twoaxis.types import Context
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.halves import turned
from twoaxis.verify.golden.registry import golden

CONTEXT = Context()
ATTENTION = "short_swa(window=4096, position='none')"  # any head width


@golden("lime")
def replay(case: Case) -> None:
    """Which of the three it is follows from the tensors."""
    if case.has("in.S"):
        router(case)
    elif case.has("in.H"):
        dynamic(case)
    elif case.has("in.x.0"):
        chain(case)
    else:
        raise NotRun("neither a router (in.S), a mix (in.H) nor a chain (in.x.0)")


def router(case: Case) -> None:
    """Rows of S: layer slow, head fast; columns: tokens slow, key|value features fast."""
    config = case.meta["config"]
    case.only(config, ("layer_index", "kv_heads", "B", "T", "head_dim"))
    n, heads, width = config["layer_index"], config["kv_heads"], config["head_dim"]
    if n == 0:
        raise NotRun("the first layer has no router")
    sizes = {"n_heads": heads, "n_kv_heads": heads}
    _, blocks = build("lime", heads * width, [[ATTENTION]] * (n + 1), **sizes)
    connection = blocks[n][0]
    assert isinstance(connection, LIMe)
    case.bind(connection, {f"routers.{n}.weight": case.leaf("param.R")})
    S = case.leaf("in.S").view(n + 1, heads, config["B"], config["T"], 2 * width)
    rows = tuple(layer.permute(1, 2, 3, 0) for layer in S.unbind(0))  # (B, T, 2 D, heads)
    (routed,) = connection.routers[str(n)](rows, (2 * width,))
    case.output("out.KV", routed.movedim(-2, 0).flatten(1))


def dynamic(case: Case) -> None:
    """A mix of given streams by weights made from another one."""
    config = case.meta["config"]
    case.only(config, ("sources", "views", "gate"))
    n, views = config["sources"], config["views"]
    x = case.leaf("in.x")
    method = f"lime(kind='dynamic', views={views}, gate={config['gate']!r})"
    _, blocks = build(method, x.shape[-1], [[ATTENTION]] * n, norm_eps=0.0)
    connection = blocks[n - 1][0]
    assert isinstance(connection, DynamicLIMe)
    if connection.mix is None:
        raise NotRun("a single stream is not mixed")
    names = {"norm.weight": "0.g", "score.weight": "1.weight", "score.bias": "1.bias"}
    case.bind(connection.mix, {ours: case.leaf(f"param.to_weights.{n}") for ours, n in names.items()})
    mixed = connection.mix(x, case.leaf("in.H").unbind(0))
    case.output("out.y", mixed[0] if views == 1 else torch.stack(mixed))


def chain(case: Case) -> None:
    """Attentions in depth order, each on an input of its own, handing on what they projected."""
    config = case.meta["config"]
    case.only(config, ("layers", "heads", "kv_heads", "head_dim", "mask"))
    if config["mask"] != "causal, additive":
        raise NotRun(f"unknown option 'mask' = {config['mask']!r}")
    count, heads, width = config["layers"], config["kv_heads"], config["head_dim"]
    sizes = {"n_heads": config["heads"], "n_kv_heads": heads}
    _, blocks = build("lime", config["heads"] * width, [["attention"]] * count, **sizes)
    sources = History()
    for n, (connection,) in enumerate(blocks):
        connection.norm = nn.Identity()  # the inputs are normed
        assert isinstance(connection, LIMe)
        core = turned(
            case, connection.layout, n, case.value("in.cos"), case.value("in.sin"), name=f"out.attn.{n}"
        )
        fused = case.leaf(f"param.{n}.kv_proj_weight").unflatten(0, (2, width, heads))  # heads fastest
        k, v = (w.transpose(0, 1).flatten(0, 1) for w in fused.unbind(0))
        qkv = torch.cat((case.leaf(f"param.{n}.q_proj.weight"), k, v))
        case.bind(core, {"qkv.weight": qkv, "out.weight": case.leaf(f"param.{n}.o_proj.weight")})
        if n:
            R = case.leaf(f"param.{n}.lime_router.static_weights")
            case.bind(connection, {f"routers.{n}.weight": R})
        state = {"stream": case.leaf(f"in.x.{n}"), "sources": sources}
        sources = connection(state, core, CONTEXT)["sources"]
