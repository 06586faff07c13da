"""ResFormer's identity form and SVFormer: a chain of attentions that read the first one's values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from twoaxis.depth import build
from twoaxis.depth.first_value import FirstValue
from twoaxis.types import Context
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.halves import turned
from twoaxis.verify.golden.registry import golden


@golden("value_residual")
def replay(case: Case) -> None:
    """Every attention's output, each on an input of its own, and V_1."""
    config = case.meta["config"]
    case.only(config, ("layers", "heads", "kv_heads", "head_dim", "mask"))
    if config["mask"] != "causal, additive":
        raise NotRun(f"unknown option 'mask' = {config['mask']!r}")
    if config["layers"] < 2:
        raise NotRun("a single attention has nobody to share its values with")
    count, sizes = config["layers"], {"n_heads": config["heads"], "n_kv_heads": config["kv_heads"]}
    method = _method(case, count)
    _, blocks = build(method, config["heads"] * config["head_dim"], [["attention"]] * count, **sizes)
    kept: dict[str, Any] = {}
    for n, (connection,) in enumerate(blocks):
        connection.norm = nn.Identity()  # the inputs are normed
        assert isinstance(connection, FirstValue)
        options = connection.cfg.core_options_at(connection.layout, n, 0)
        core = turned(
            case,
            connection.layout,
            n,
            case.value("in.cos"),
            case.value("in.sin"),
            name=f"out.attn.{n}",
            **options,
        )
        own = "qkv" if core.value_projection else "qk"
        weight = torch.cat([case.leaf(f"param.{n}.{x}_proj.weight") for x in own])
        case.bind(core, {"qkv.weight": weight, "out.weight": case.leaf(f"param.{n}.o_proj.weight")})
        state = connection({"stream": case.leaf(f"in.x.{n}"), **kept}, core, Context())
        if n == 0:
            kept = {name: value for name, value in state.items() if name == "value"}
            if kept:
                case.output("out.V1", kept["value"].flatten(2))


def _method(case: Case, count: int) -> str:
    """The JSON says it in words, and the tensors must agree."""
    said = str(case.meta.get("method", "")).lower()
    own = [n for n in range(1, count) if case.has(f"param.{n}.v_proj.weight")]
    if "svformer" in said and not own:
        return "svformer"
    if "resformer" in said and "identity" in said and len(own) == count - 1:
        return "value_residual"
    raise NotRun(f"unknown method {case.meta.get('method')!r}")
