"""The duality in numbers: a depth read is short sliding-window attention over layers (arXiv 2603.16039).

    tokens:  position t of T,  window w,  cache over tokens        local_attention on (B, H, T, D)
    depth:   layer l of L,     window K,  cache over layers        local_attention on (B T, H, L, D)

Every row computes one thing in two ways with random weights and gives the largest difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from twoaxis import spec
from twoaxis.cache import Cache
from twoaxis.depth.depth_window import DepthWindow
from twoaxis.depth.window_read import WindowRead
from twoaxis.depth.windowed import WindowedStream
from twoaxis.model import Block, Decoder, ModelConfig
from twoaxis.ops import depth_read, local_attention, mix
from twoaxis.sequence import ShortSWA
from twoaxis.types import Context, Reads
from twoaxis.verify.identities import identities
from twoaxis.verify.setting import Row, Setting, difference

B, T, L, H, D, K = 2, 7, 6, 3, 5, 3
BACKENDS = ("sdpa", "blocked")  # what "auto" takes for as few keys as here, and for long rows
SEQUENCE = ["short_swa(window=3)", "attention", "mlp"]


def duality(dtype: str = "float64", device: str = "cpu", seed: int = 0) -> list[Row]:
    """Every identity, on a device, in float64, float32 or bfloat16. InputError if it cannot be used."""
    s = Setting(dtype, device, seed)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # building a model draws numbers
        rows = [*given_qkv(s), *module_level(s), *identities(s)]
    return [Row(name, error, s.bound) for name, error in rows]


def given_qkv(s: Setting) -> Iterator[tuple[str, float]]:
    """The operator on the transposed stack against one depth read per layer, for given q, k, v."""
    q, k, v = (s.randn(B * T, H, L, D) for _ in range(3))
    for window in (1, K):
        reads = [_read(q, k, v, layer, window) for layer in range(L)]
        yield f"depth read, K = {window} = ShortSWA on the transposed stack", _against(reads, q, k, v, window)
    reads = [_read(q, k, v, layer, layer + 1) for layer in range(L)]
    yield "full depth read, K = l + 1 = attention on the transposed stack", _against(reads, q, k, v, None)
    full = local_attention(q, k, v, None).unbind(2)
    yield "full memory = window K = L", _against(list(full), q, k, v, L)


def _against(reads: list[Tensor], q: Tensor, k: Tensor, v: Tensor, window: int | None) -> float:
    """One read per layer against the operator on the stack, on each backend."""
    stacks = [local_attention(q, k, v, window, backend=backend) for backend in BACKENDS]
    return difference(reads * len(stacks), [rows for stack in stacks for rows in stack.unbind(2)])


def _read(q: Tensor, k: Tensor, v: Tensor, layer: int, window: int) -> Tensor:
    """The read of one layer, (B T, H, D), from the keys and values of its window as tuples of sources."""
    seen = range(max(0, layer - window + 1), layer + 1)
    keys, values = ([x[:, :, i].flatten(1) for i in seen] for x in (k, v))  # each (B T, H D)
    query = q[:, :, layer].flatten(1)
    options = {"key_norm_eps": None, "scale": D**-0.5}
    _, weights = depth_read(query, keys, heads=H, return_weights=True, **options)  # (B T, H, n)
    heads = [mix([x.unflatten(1, (H, D))[:, h] for x in values], weights[:, h].unbind(-1)) for h in range(H)]
    return torch.stack(heads, 1)


def module_level(s: Setting) -> Iterator[tuple[str, float]]:
    """The short_swa mixer, with a depth_window's weights, over the layers of a real model."""
    for option, window in ((f"window_blocks={K}, ", K), ("", L)):
        depth = f"depth_window({option}shared=True, output=True)"
        name = f"depth_window, K = {K}" if option else "depth_window, full"
        model, states, reads = _trajectory(s, depth)
        mixer, stack = _mixer(model, window), torch.stack(states, 2).flatten(0, 1)  # (B T, L, d)
        parallel = mixer(Reads(stack), Context())
        rows = [y.unflatten(0, (B, T)) for y in parallel.unbind(1)]
        yield f"{name}: a model's reads = the short_swa mixer over its layers", difference(reads, rows)
        stepped = _steps(mixer, stack)
        yield f"{name}: step = parallel along depth", difference(stepped.unbind(1), parallel.unbind(1))
        explicit = _explicit(model, states, window)
        yield f"{name}: absorbed = explicit projections", difference(reads, explicit)
    yield "depth_window, full = window_blocks = L: logits", _full_is_wide(s)
    yield "step = parallel along the sequence: logits", _decode(s)


def _config(s: Setting, depth: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=29,
        d_model=H * D * 2,
        n_blocks=L,
        n_heads=H,
        depth=depth,
        sequence=SEQUENCE,
        state_dtype=s.dtype,
    )


def _trajectory(s: Setting, depth: str) -> tuple[Decoder, list[Tensor], list[Tensor]]:
    """A model, its block states h(0) .. h(L-1), each (B, T, d), and what it read at each."""
    model = s.decoder(_config(s, depth))
    _, by_name = model(s.tokens(B, T, model.cfg.vocab_size), return_states=True)
    before = [by_name[f"block.{layer}"] for layer in range(L)]
    reads = []
    for block, state in zip(model.blocks, before, strict=True):
        connection = cast(Block, block).connections[0]
        assert isinstance(connection, DepthWindow)
        reads.append(connection.read_depth(state))
    return model, [state["sources"].sources[-1] for state in before], reads


def _projections(model: Decoder) -> WindowRead:
    assert isinstance(model.stream, WindowedStream)
    assert model.stream.window_read is not None
    return model.stream.window_read


def _mixer(model: Decoder, window: int) -> ShortSWA:
    """A short_swa mixer of one head without positions that holds the model's depth projections."""
    cfg = spec.parse_spec("sequence", f"short_swa(window={window}, n_heads=1, position='none')")
    weight = model.embedding.weight
    mixer = ShortSWA(cfg, model.cfg.layout(), 0).to(weight.device, weight.dtype)
    read = _projections(model)
    qkv = [read.get_parameter(f"{name}.weight").detach() for name in ("query", "key", "value")]
    mixer.qkv.weight.copy_(torch.cat(qkv))
    mixer.get_parameter("out.weight").copy_(read.get_parameter("output.weight"))
    return mixer.eval()


def _steps(mixer: ShortSWA, stack: Tensor) -> Tensor:
    """The mixer fed one layer at a time through its own window cache."""
    slot = mixer.new_slot(stack.shape[0], None, 0, stack.dtype, stack.device)
    cache, rows = Cache({mixer.slot_name: slot}, stack.shape[0]), []
    for layer in stack.split(1, dim=1):
        rows.append(mixer(Reads(layer), Context(cache=cache)))
        cache.advance(1)
    return torch.cat(rows, 1)


def _explicit(model: Decoder, states: list[Tensor], window: int) -> list[Tensor]:
    """The reads from keys and values that were projected once per state and kept over depth."""
    read = _projections(model)
    kept = [read.project(state) for state in states]
    outputs = []
    for layer, state in enumerate(states):
        seen = kept[max(0, layer - window + 1) : layer + 1]
        outputs.append(read.attend(state, tuple(k for k, _ in seen), tuple(v for _, v in seen)))
    return outputs


def _full_is_wide(s: Setting) -> float:
    full, wide = (s.decoder(_config(s, f"depth_window({o})")) for o in ("", f"window_blocks={L}"))
    wide.load_state_dict(full.state_dict())
    tokens = s.tokens(B, T, full.cfg.vocab_size)
    return difference([wide(tokens)], [full(tokens)])


def _decode(s: Setting) -> float:
    model = s.decoder(_config(s, f"depth_window(window_blocks={K})"))
    tokens, cache = s.tokens(B, 2 * T, model.cfg.vocab_size), model.new_cache(B)
    pieces = [model(piece, cache=cache) for piece in tokens.split([T] + [1] * T, dim=1)]
    return difference([torch.cat(pieces, 1)], [model(tokens)])
