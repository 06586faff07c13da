"""MUDDFormer: the mix after every block, the JAX code's normed form of it, and a whole tiny model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.depth.connection import Connection, Stream, build
from twoaxis.depth.history import History
from twoaxis.depth.muddformer import MUDDFormer, MUDDStream, newest, pushed
from twoaxis.depth.muddformer_mix import DenseMix
from twoaxis.sequence import MLP
from twoaxis.types import Context
from twoaxis.verify.golden.case import Case, NotRun
from twoaxis.verify.golden.halves import turned
from twoaxis.verify.golden.registry import golden

ABOUT = ("dtype", "environment", "file", "loss_for_gradients", "ran", "semantics", "source", "tensors")
BLOCK = ["attention", "mlp"]
CONTEXT = Context()


@golden("muddformer")
def replay(case: Case) -> None:
    """Which of the three it is follows from the tensors."""
    if case.has("ids"):
        model(case)
    elif case.has("X"):
        mixes(case)
    else:
        raise NotRun("neither a model (ids) nor a stack of block outputs (X)")


def _method(shapes: list[tuple[int, int, int]], options: str = "") -> str:
    """The spec whose generators have these shapes (hidden width, ways, sources), last one last."""
    ways = shapes[0][1] if len(shapes) > 1 else 4
    for rounded in (True, False):
        for expanded in (True, False):
            name = f"muddformer(ways={ways}, round64={rounded}, expand_last={expanded}{options})"
            config = spec.parse_spec("depth", name)
            last = len(shapes) - 1
            if all(config.hidden(n, c, i == last) == h for i, (h, c, n) in enumerate(shapes)):
                return name
    raise NotRun(f"generators of shapes {shapes} follow no known rule")


def _bind(case: Case, mix: DenseMix, values: dict[str, Tensor]) -> None:
    case.bind(mix, {name: value.to(torch.float64) for name, value in values.items()})


def _mixes_of(stream: Stream, blocks: list[list[Connection]]) -> list[DenseMix]:
    """The mix after each block, the one in `close` last."""
    firsts = [connections[0] for connections in blocks[1:]]
    found = [c.mix for c in firsts if isinstance(c, MUDDFormer) and c.mix is not None]
    assert isinstance(stream, MUDDStream)
    return [*found, stream.mix]


def mixes(case: Case) -> None:
    """Block outputs in; after each block the ways of the next, and in the plain form the weights."""
    normed, L = case.has("pre_gain.0"), case.meta["L"]
    case.only(case.meta, (*ABOUT, "L", "eps" if normed else "norm_eps"))
    X = [x.double() for x in case.leaf("X").unbind(0)]
    static = [case.leaf(f"a.{i}") for i in range(L)]
    W1, W2 = ([case.leaf(f"{w}.{i}") for i in range(L)] for w in ("W1", "W2"))
    if normed:  # flax kernels (d, h) and (h, C, n)
        W1, W2 = [w.T for w in W1], [w.movedim(0, -1).flatten(0, 1) for w in W2]
    shapes = [(len(w), *a.shape) for w, a in zip(W1, static, strict=True)]
    form = ", pre_post_norm=True, pre_post_form='code', gelu='tanh'" if normed else ""
    eps = case.meta["eps" if normed else "norm_eps"]
    stream, blocks = build(_method(shapes, form), X[0].shape[-1], [BLOCK] * L, norm_eps=eps)
    assert isinstance(stream, MUDDStream)
    norms = [stream.source_norm, *(connections[-1].source_norm for connections in blocks)]
    state: Any = pushed(History(), X[0], _gained(case, norms[0], "pre_gain.0"))
    for i, mix in enumerate(_mixes_of(stream, blocks)):
        extra = {"gain": f"gen_gain.{i}", "post_norm.weight": f"post_gain.{i}"} if normed else {}
        values = {"static": static[i], "down": W1[i], "up": W2[i]}
        _bind(case, mix, {**values, **{ours: case.leaf(theirs) for ours, theirs in extra.items()}})
        norm = _gained(case, norms[i + 1], f"pre_gain.{i + 1}")
        state = pushed(state["sources"], X[i + 1], norm)
        case.output(f"streams.{i}", torch.stack(mix(state["sources"].sources, newest(state))))
        if case.has(f"weights.{i}"):
            case.output(f"weights.{i}", mix.weights(newest(state)).movedim(-2, 0))


def _gained(case: Case, norm: Any, name: str) -> Any:
    if norm is not None:
        case.bind(norm, {"weight": case.leaf(name).double()})
    return norm


def model(case: Case) -> None:
    """Tokens in, logits out: connections, attention and MLPs of this library, with the file's angles.

    The file rounds its angles to bfloat16 and its MLP widths to multiples of 128, so both are taken from it.
    """
    config = case.meta["config"]
    case.only(case.meta, (*ABOUT, "config"))
    case.only(config, ("F", "L", "d", "heads", "norm_eps", "rope_base"))
    L, d = config["L"], config["d"]
    static = [case.leaf(f"param.dense_bs.{i}") for i in range(L)]
    W1, W2 = ([case.leaf(f"param.dynamic_dense.{i}.w{j}.weight") for i in range(L)] for j in (1, 2))
    shapes = [(len(w), *a.shape) for w, a in zip(W1, static, strict=True)]
    sizes = {"n_heads": config["heads"], "n_kv_heads": config["heads"], "norm_eps": config["norm_eps"]}
    stream, blocks = build(_method(shapes), d, [BLOCK] * L, qk_norm=True, **sizes)
    for i, mix in enumerate(_mixes_of(stream, blocks)):
        _bind(case, mix, {"static": static[i], "down": W1[i], "up": W2[i]})
    case.bind(stream, {"norm.weight": case.leaf("param.norm.weight").double()})
    ids = case.value("ids")
    angles = case.value("rope_cos_sin").double()[: ids.shape[1]]  # (T, D / 2, 2)
    cos, sin = torch.cat((angles, angles), 1).unbind(-1)
    table = case.leaf("param.tok_embeddings.weight").double()
    state = stream.open(table[ids], CONTEXT)
    for i, connections in enumerate(blocks):
        _bind_norms(case, connections, i)
        attention = turned(case, connections[0].layout, i, cos, sin)
        _bind_attention(case, attention, f"param.layers.{i}.attention.")
        for connection, core in zip(connections, (attention, _mlp(case, connections[1], i)), strict=True):
            state = connection(state, core, CONTEXT)
    case.output("output", stream.close(state, CONTEXT) @ case.leaf("param.output.weight").double().T)


def _bind_norms(case: Case, connections: list[Connection], i: int) -> None:
    """One norm before the first attention, one for each of q, k, v before the others."""
    layer = f"param.layers.{i}."
    names = {"norm": f"{layer}attention_norm.weight"}
    if i:
        ways = ("norm", "key_norm", "value_norm")
        names = {name: f"{layer}attention_norms.{j}.weight" for j, name in enumerate(ways)}
    case.bind(connections[0], {f"{n}.weight": case.leaf(theirs).double() for n, theirs in names.items()})
    case.bind(connections[1], {"norm.weight": case.leaf(f"{layer}ffn_norm.weight").double()})


def _bind_attention(case: Case, core: torch.nn.Module, prefix: str) -> None:
    qkv = torch.cat([case.leaf(f"{prefix}w{x}.weight").double() for x in "qkv"])
    norms = {f"{x}_norm.weight": case.leaf(f"{prefix}{x}_norm.weight").double() for x in "qk"}
    case.bind(core, {"qkv.weight": qkv, "out.weight": case.leaf(f"{prefix}wo.weight").double(), **norms})


def _mlp(case: Case, connection: Connection, i: int) -> MLP:
    """SwiGLU of the file's width, which must be the one that its rule of re-allocation gives."""
    gate, down, up = (case.leaf(f"param.layers.{i}.feed_forward.w{j}.weight").double() for j in (1, 2, 3))
    F, L = case.meta["config"]["F"], case.meta["config"]["L"]
    width = round(F * (i / (L - 1) + 0.5) / 128) * 128
    if width != len(gate):
        raise NotRun(f"block {i} has an MLP of width {len(gate)}, not {width}")
    core = MLP(spec.parse_spec("sequence", f"mlp(hidden={width})"), connection.layout, i)
    case.bind(core, {"up.weight": torch.cat((gate, up)), "down.weight": down})
    return core
