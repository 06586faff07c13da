"""Replay Canon layers (facebookresearch/PhysicsLM4): the operator, its decoding, and whole Llama blocks with it.

A recorded block is the `additive` connection around the two cores that `canon(set=...)` makes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from twoaxis import spec
from twoaxis.depth import build
from twoaxis.sequence import Mixer, SequenceConfig, carried_out
from twoaxis.sequence.rotary import rotary_angles
from twoaxis.types import Context, Layout, Reads
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.feed import cache_of, feed, newest
from twoaxis.verify.golden.registry import golden

SIZES = ("B", "T", "D", "Hq", "Hkv", "d", "d_ff", "c")


@golden("canon")
def replay(case: Case) -> None:
    """A case is the operator alone or a layer."""
    name = str(case.meta.get("case"))
    if name.startswith("op"):
        operator(case)
    elif name.startswith("layer"):
        layer(case)
    else:
        raise NotRun(f"unknown case {name!r}")


def operator(case: Case) -> None:
    """The `canon` mixer: all at once, and a prompt and then single tokens; its memory is the recorded state."""
    params = case.meta["params"]
    case.only(params, (*SIZES, "kernel", "prefill", "residual", "silu"))
    x, kernel, prefill = case.leaf("x"), params["kernel"], params["prefill"]
    act = "silu" if params["silu"] else "none"
    text = f"canon(kernel={kernel}, residual={bool(params['residual'])}, activation={act!r})"
    core = _core(spec.parse_spec("sequence", text), Layout(d_model=x.shape[-1], blocks=()))
    case.bind(core, {"conv.weight": case.leaf("w").squeeze(1)})
    case.output("out", core(Reads(x), Context()))
    given, cache = (
        x.detach(),
        cache_of(core, x, max_rollback=1),
    )  # one row more than needed: the states have K
    (slot,) = cache.slots.values()
    first = feed(core, given[:, :prefill], [prefill], cache)
    case.output("state_after_prefill", newest(slot.entries()["u"], kernel))
    rest = feed(core, given[:, prefill:], [1] * (x.shape[1] - prefill), cache)
    case.output("state_end", newest(slot.entries()["u"], kernel))
    case.output("out_cached", torch.cat((first, rest), 1))


def layer(case: Case) -> None:
    """x' = u + mlp(N2 u), u = x + attention(N1 x), with Canon at the recorded points; also token by token."""
    params = case.meta["params"]
    case.only(params, (*SIZES, "canon_set", "kernel", "qk_norm", "rms_eps", "rope_dim", "rope_theta"))
    x, points = case.leaf("x"), params["canon_set"]
    if set(points) - set("ABCD"):
        raise NotRun(f"unknown option 'canon_set' = {points!r}")
    norm = "'full'" if params["qk_norm"] else "False"
    texts = [
        f"attention(n_heads={params['Hq']}, n_kv_heads={params['Hkv']}, head_dim={params['D']}, "
        f"rope_dims={params['rope_dim']}, qk_norm={norm})",
        f"mlp(hidden={params['d_ff']})",
    ]
    if points:
        texts.append(f"canon(set={points!r}, kernel={params['kernel']})")
    block = carried_out([spec.parse_spec("sequence", text) for text in texts])
    plan = [c.spec() for c in block]
    sizes = {"norm_eps": params["rms_eps"], "rope_base": params["rope_theta"]}
    _, (connections,) = build("additive", x.shape[-1], [plan], **sizes)
    layout = Layout(d_model=x.shape[-1], blocks=(tuple(plan),), **sizes)
    cores = [_core(c, layout) for c in block]
    _bind(case, nn.ModuleList(connections), nn.ModuleList(cores), points)
    cores[0].angles = _recorded_angles(case, x.shape[1])  # type: ignore[assignment]
    state = x
    for connection, core in zip(connections, cores):
        state = connection(state, core, Context())
    case.output("out", state)


def _recorded_angles(case: Case, tokens: int) -> Callable[..., tuple[Tensor, ...]]:
    """The recorded rotation in the place of ours: theirs is float32, ours in a float64 model is not."""
    params = case.meta["params"]
    ours = rotary_angles(torch.arange(tokens), params["rope_dim"], params["rope_theta"], torch.float64)
    halves = []
    for name, angles in zip(("cos", "sin"), ours):
        recorded = case.value(name)[0]  # (T, r), both halves alike
        if recorded.shape != (tokens, params["rope_dim"]):
            raise NotRun(f"{name} is not (1, T, rope_dim)")
        error = (recorded - torch.cat((angles, angles), -1)[:, 0]).abs().max()
        if error > 1e-6:
            raise ValueError(f"{name} is off by {error:.1e} from positions and rope_theta")
        halves.append(recorded[:, None, : angles.shape[-1]])
    return lambda positions, dtype: tuple(halves)


def _core(cfg: SequenceConfig, layout: Layout) -> Mixer:
    core: Mixer = spec.method("sequence", cfg.name)(cfg, layout, 0)
    return core


def _bind(case: Case, connections: nn.Module, cores: nn.Module, points: str) -> None:
    attention, mlp = "self_attn", "mlp"
    qkv = [case.leaf(f"w.{attention}.{n}_proj") for n in "qkv"]
    up = [case.leaf(f"w.{mlp}.{n}_proj") for n in ("gate", "up")]
    values: dict[str, Tensor] = {
        "0.qkv.weight": torch.cat(qkv),
        "0.out.weight": case.leaf(f"w.{attention}.o_proj"),
        "1.up.weight": torch.cat(up),
        "1.down.weight": case.leaf(f"w.{mlp}.down_proj"),
    }
    if case.meta["params"]["qk_norm"]:
        values |= {f"0.{n}_norm.weight": case.leaf(f"w.{attention}.{n}_norm") for n in "qk"}
    places = {
        "A": ("0.mixers.input", ""),
        "B": ("0.mixers.qkv", f"{attention}."),
        "C": ("1.mixers.input", ""),
    }
    places["D"] = ("1.mixers.hidden_input", f"{mlp}.")
    for point in points:
        where, prefix = places[point]
        values[f"{where}.conv.weight"] = case.leaf(f"w.{prefix}canon{point}").squeeze(1)
    case.bind(cores, values)
    norms = ("input_layernorm", "post_attention_layernorm")
    case.bind(connections, {f"{i}.norm.weight": case.leaf(f"w.{n}") for i, n in enumerate(norms)})
