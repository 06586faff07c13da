"""The backbone of the recorded Deep Delta models: stand-in cores around the public stream and connections.

Rotary angles come before a learned norm of each head's q and k; no biases; SwiGLU; a tied head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.cache import Cache, Remembers, Slot, name_slots, remembering
from twoaxis.depth import DDL
from twoaxis.depth.ddl_compress import ConvMemory, DDLStream
from twoaxis.ops import local_attention, rotate
from twoaxis.sequence.rotary import rotary_angles
from twoaxis.types import Context, Reads
from twoaxis.verify.golden.case import Case


def weight(case: Case, name: str) -> Tensor:
    """A parameter of the file; of a whole model in float64, or rounding would add to the recorded one."""
    leaf = case.leaf(name)
    return leaf.double() if case.has("in.idx") else leaf


class Attention(nn.Module, Remembers):
    """Causal attention whose heads' queries and keys are rotated, then normalised."""

    def __init__(self, case: Case, prefix: str, base: float, norm_eps: float) -> None:
        super().__init__()
        self.base, self.eps = base, norm_eps
        self.q, self.k, self.v, self.out = (
            weight(case, f"{prefix}{name}.weight") for name in ("c_q", "c_k", "c_v", "c_proj")
        )
        self.q_gain, self.k_gain = (weight(case, f"{prefix}{name}.weight") for name in ("q_rms", "k_rms"))

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        width = self.q_gain.shape[0]
        q, k, v = (F.linear(reads.x, w).unflatten(-1, (-1, width)) for w in (self.q, self.k, self.v))
        start = ctx.cache.length if ctx.cache is not None else 0
        positions = torch.arange(start, start + q.shape[1])
        cos, sin = rotary_angles(positions, width, self.base, q.dtype)
        q = F.rms_norm(rotate(q, cos, sin), (width,), self.q_gain, self.eps)
        k = F.rms_norm(rotate(k, cos, sin), (width,), self.k_gain, self.eps)
        if ctx.cache is not None:
            rows = ctx.cache[self.slot_name].append(k=k, v=v)
            k, v = rows["k"], rows["v"]
        y = local_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None)
        return F.linear(y.transpose(1, 2).flatten(2), self.out)

    def new_slot(
        self,
        batch_size: int,
        max_length: int | None,
        max_rollback: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Slot:
        width = self.q_gain.shape[0]
        row = ((self.k.shape[0] // width, width), dtype)
        return Slot(batch_size, {"k": row, "v": row}, keep=None, max_length=max_length, device=device)


class MLP(nn.Module):
    """y = W_down (silu(W_1 x) * W_2 x)."""

    def __init__(self, case: Case, prefix: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            weight(case, f"{prefix}{name}.weight") for name in ("c_fc1", "c_fc2", "c_proj")
        )

    def forward(self, reads: Reads, ctx: Context) -> Tensor:
        return F.linear(F.silu(F.linear(reads.x, self.gate)) * F.linear(reads.x, self.up), self.down)


class Backbone(nn.Module):
    """Logits of tokens, and without a cache every state as the stream's read-out gives it."""

    def __init__(
        self, case: Case, stream: DDLStream, connections: list[DDL], base: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.table = weight(case, "param.transformer.wte.weight")
        self.stream, self.connections = stream, nn.ModuleList(connections)
        self.cores = nn.ModuleList()
        for layer in range(len(connections) // 2):
            prefix = f"param.transformer.h.{layer}."
            self.cores += [Attention(case, f"{prefix}attn.", base, norm_eps), MLP(case, f"{prefix}mlp.")]

    def forward(self, tokens: Tensor, ctx: Context) -> tuple[Tensor, list[Tensor]]:
        x = self.table[tokens]
        state, hidden = self.stream.open(x, ctx), [x]
        for index, (connection, core) in enumerate(zip(self.connections, self.cores, strict=True)):
            state = connection(state, core, ctx)
            if index % 2 and ctx.cache is None:
                hidden.append(self.stream.readout(state, ctx))
        return F.linear(self.stream.close(state, ctx), self.table), hidden


def fed(
    case: Case,
    module: nn.Module,
    chunks: Sequence[Tensor],
    call: Callable[[Tensor, Context], Tensor],
    memory: str = "",
) -> tuple[Tensor, list[Tensor]]:
    """What chunks fed one by one give, and after each the rows kept in `memory`, (B, channels, k-1)."""
    name_slots(module)
    owners, device = dict(remembering(module)), torch.device("cpu")
    dtype = torch.float64 if case.has("in.idx") else case.dtype
    batch = chunks[0].shape[0]
    slots = {name: m.new_slot(batch, None, 0, dtype, device) for name, m in owners.items()}
    cache, outputs, states = Cache(slots, batch), [], []
    for chunk in chunks:
        outputs.append(call(chunk, Context(cache=cache)))
        cache.advance(chunk.shape[1])
        if memory:
            owner = module.get_submodule(memory)
            assert isinstance(owner, ConvMemory)
            nothing = chunk.new_zeros(batch, 0, *owner.channels)
            rows = slots[memory].append(u=nothing)["u"].flatten(2).mT
            states.append(F.pad(rows, (owner.kernel - 1 - rows.shape[-1], 0)))
    return torch.cat(outputs, 1), states
