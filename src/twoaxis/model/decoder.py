"""The two-axis decoder: embeddings, a depth method's stream, blocks, head."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis import spec
from twoaxis.cache import Cache, document_positions, name_slots, remembering
from twoaxis.depth import ahead
from twoaxis.depth.connection import Connection, Stream
from twoaxis.depth.history_spec import parse_history
from twoaxis.errors import InputError
from twoaxis.linear import Linear
from twoaxis.model.block import Block
from twoaxis.model.config import ModelConfig
from twoaxis.model.init import init_core, init_embedding
from twoaxis.model.inputs import check_inputs, check_targets, look_up
from twoaxis.model.loss import chunked_token_loss
from twoaxis.model.saving import Saving
from twoaxis.norm import RMSNorm
from twoaxis.ops import rebuilt, token_loss
from twoaxis.ops.choice import settled
from twoaxis.ops.known_gates import gates_of
from twoaxis.ops.known_mix import weights_of
from twoaxis.ops.known_read import queries_of
from twoaxis.types import DTYPES, Context, DepthRule, ParamRule


class Decoder(nn.Module):
    """A causal language model: `model(tokens) -> logits`. Seeded by torch's generator."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        if not isinstance(cfg, ModelConfig):
            raise InputError(f"a Decoder is made of a ModelConfig, not {type(cfg).__name__}")
        self.cfg = cfg
        layout, depth = cfg.layout(), cfg.depth_config()
        method: type[Connection] = spec.method("depth", depth.name)
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.d_model)
        init_embedding(self.embedding, layout)
        self.stream: Stream
        self.stream, connections = method.network(depth, layout)
        blocks = []
        for index, configs in enumerate(cfg.block_configs()):
            cores = []
            for place, core_cfg in enumerate(configs):
                options = depth.core_options_at(layout, index, place)
                core = spec.method("sequence", core_cfg.name)(core_cfg, layout, index, **options)
                init_core(core, layout)
                cores.append(core)
            blocks.append(Block(connections[index], cores))
        self.blocks = nn.ModuleList(blocks)
        self.head = Linear(cfg.d_model, cfg.vocab_size)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            init_embedding(self.head, layout)
        self.saving = Saving()  # what stays for the backward pass
        self.rebuilding = True  # make states again in backward, across blocks (`ops/rebuilt.py`)
        self.depth_window: DepthRule | None = None  # see `depth_windows`
        self.recomputes = parse_history(cfg.history).recompute  # keep nothing of the depth axis for backward
        name_slots(self)

    def forward(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        return_states: bool = False,
        return_last: bool = False,
        last: int | None = None,
    ) -> Any:
        """Logits (B, T, V) for tokens (B, T).

        segments: (B, T) document ids, -1 is padding; a document is one run of its id (where padding or
        another document comes between, give the positions). positions: (T,) or (B, T), by default
        counted within each run, on from what the cache has seen. return_states: also return {"block.0":
        the state before block 0, .., "block.L": the state after the last, "final": what the head reads}.
        return_last: also return the state after the last block. last: only the logits of the last so many tokens.
        """
        ctx = self.context(tokens, segments, positions, cache)
        if return_last:
            x, state = self.to_the_end(tokens, ctx)
            return self.logits(x), state
        if cache is None:
            return self.run(tokens, ctx, return_states, last)
        with nullcontext() if torch.compiler.is_compiling() else settled():
            out = self.run(tokens, ctx, return_states, last)
        cache.advance(tokens.shape[1])
        return out

    def context(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Context:
        """What the blocks need to know of these tokens: the first half of `forward`, before computing."""
        check_inputs(tokens, segments, positions, cache)
        if cache is not None:
            segments, positions = cache.begin(tokens.shape[1], segments, positions)
        elif segments is not None and positions is None:
            positions = document_positions(segments)
        return Context(segments, positions, cache, self.depth_window)

    def run(self, tokens: Tensor, ctx: Context, return_states: bool = False, last: int | None = None) -> Any:
        """The second half of `forward`, on tensors alone; with a cache, `cache.advance` has to follow."""
        states: dict[str, Any] | None = {} if return_states else None
        x, _ = self.to_the_end(tokens, ctx, states)
        logits = self.logits(x if last is None else x[:, max(0, x.shape[1] - last) :])
        return logits if states is None else (logits, {**states, "final": x})

    def to_the_end(
        self, tokens: Tensor, ctx: Context, states: dict[str, Any] | None = None
    ) -> tuple[Tensor, Any]:
        """What the head reads (B, T, d), and the state after the last block; those at all boundaries into `states`."""
        embedded = look_up(self.embedding, tokens).to(self.state_dtype)
        if self.recomputes and self.training and ctx.cache is None and states is None:
            ended: tuple[Tensor, Any] = checkpoint(self._through, embedded, ctx, None, use_reentrant=False)
            return ended
        return self._through(embedded, ctx, states)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V), of what the head reads."""
        read: Tensor = self.head(x.to(self.head.weight.dtype))
        return read

    def _through(self, embedded: Tensor, ctx: Context, states: dict[str, Any] | None) -> tuple[Tensor, Any]:
        """From embeddings (B, T, d) to what `to_the_end` gives."""
        plain = self.saving.saved == "all" and not self.recomputes
        whole = ctx.cache is None and self.rebuilding and (plain or not self.training)
        known = partial(queries_of, self), partial(weights_of, self), partial(gates_of, self)
        loop = rebuilt.loop(whole, *known)
        with loop, ahead.loop(*self._order(ctx)), self.saving.around(self, embedded.device):
            state = self.stream.open(embedded, ctx)
            if states is not None:
                states["block.0"] = state
            for index, block in enumerate(self.blocks):
                state = self.saving.through(block, index, state, ctx)
                if states is not None:
                    states[f"block.{index + 1}"] = state
            return self.stream.close(state, ctx), state

    def _order(self, ctx: Context) -> tuple[list[RMSNorm | None], list[Connection]]:
        """The norms of all reads and all connections in their order, for `ahead`; none in decoding's short calls, where
        blocks are recomputed, and where others wrap them (FSDP gathers a block's weights for that block alone)."""
        others = any(type(b) is not Block for b in self.blocks)
        if ctx.cache is not None or self.saving.saved == "blocks" or others:
            return [], []
        connections: list[Connection] = [c for block in self.blocks for c in block.connections]  # type: ignore[union-attr]
        return [*(c.opening for c in connections), self.stream.norm], connections

    def loss(
        self, tokens: Tensor, targets: Tensor, *, segments: Tensor | None = None, chunked: bool = False
    ) -> Tensor:
        """Mean cross-entropy in nats over targets that are not -100, in float32; 0 when there are none.

        chunked: the logits never exist whole, see `chunked_token_loss`.
        """
        check_targets(tokens, targets)
        if chunked:
            x, _ = self.to_the_end(tokens, self.context(tokens, segments))
            summed = self.chunked_loss(x, targets)
        else:
            summed = token_loss(self(tokens, segments=segments), targets)
        return summed / (targets != -100).sum().clamp(min=1)

    def chunked_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum that `loss` divides, of what the head reads (B, T, d), without whole logits."""
        return chunked_token_loss(x.to(self.head.weight.dtype), self.head.weight, targets)

    def new_cache(
        self,
        batch_size: int,
        max_length: int | None = None,
        max_rollback: int = 0,
        *,
        fixed_shapes: bool = False,
    ) -> Cache:
        """An empty decoding cache.

        max_length: tokens it must hold; None lets full attention grow. max_rollback: tokens that may be taken
        back after windows have filled. fixed_shapes: each step reads as many rows as fit, filled or not, so
        that `compiled_step` compiles once; full attention then needs max_length.
        """
        for name, value in (
            ("batch_size", batch_size),
            ("max_length", max_length),
            ("max_rollback", max_rollback),
        ):
            if value is not None and (type(value) is not int or value < 0):
                raise InputError(f"new_cache({name}={value!r}): allowed is an integer of 0 or more")
        weight = self.embedding.weight
        slots = {
            name: module.new_slot(batch_size, max_length, max_rollback, weight.dtype, weight.device)
            for name, module in remembering(self)
        }
        return Cache(slots, batch_size, max_rollback, fixed_shapes=fixed_shapes, device=weight.device)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Decoder:
        """torch's, refused where constants that no file holds would be left without their numbers."""
        for name, _ in self.named_buffers():
            raise InputError(f"to_empty would leave {name} without its numbers; build the model on {device}")
        return super().to_empty(device=device, recurse=recurse)

    def param_rules(self) -> dict[str, ParamRule]:
        """How the optimiser treats each parameter: matrices of cores and embeddings decay; norms, biases,
        scalars and everything of the depth axis do not, unless the method's own paper says so."""
        owners = {name: m for name, m in self.named_modules() if isinstance(m, Connection | Stream)}
        rules = {}
        for name, parameter in self.named_parameters():
            owner = max((o for o in owners if name.startswith(o + ".")), key=len, default=None)
            if owner is None:
                rules[name] = ParamRule(decay=parameter.ndim >= 2 and "position_bias" not in name)
            else:
                rules[name] = owners[owner].param_rule(name[len(owner) + 1 :])
        return rules

    @property
    def checkpointing(self) -> bool:
        """Whether every block is recomputed in backward: `saving` in short, which setting it sets."""
        return self.saving == Saving("blocks")

    @checkpointing.setter
    def checkpointing(self, wanted: bool) -> None:
        self.saving = Saving("blocks" if wanted else "all")

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the residual state: the configured one, or float64 in a float64 model."""
        wide = self.stream.norm.weight.dtype == torch.float64
        return torch.float64 if wide else DTYPES[self.cfg.state_dtype]
