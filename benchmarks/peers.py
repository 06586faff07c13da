"""Whole models of x-transformers at our sizes, for `steps.py --peers`: its methods beside its own plain model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from packages import installed
from torch import Tensor, nn

OURS = {  # x-transformers' option, by our method
    "attnres": {
        "attn_aggregated_residuals": True
    },  # its queries are made of the state, by a product of rank 64
    "hyper_connections": {"num_residual_streams": 4},
    "lime(kind='dynamic')": {"integrate_layers": True},
    "value_residual": {"add_value_residual": True},
}


class Peer(nn.Module):
    """A foreign language model with a `loss` like ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(tokens).flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def x_transformers(args: Any, **options: Any) -> nn.Module:
    """RMSNorm, rotary positions, SwiGLU without biases, tied embeddings, SDPA: our plain model by x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=args.width, depth=args.blocks, heads=args.heads, attn_dim_head=args.width // args.heads, attn_flash=True,
        use_rmsnorm=True, rotary_pos_emb=True, ff_glu=True, ff_swish=True, ff_no_bias=True,
        ff_mult=args.hidden / args.width, **options,
    )  # fmt: skip
    model = TransformerWrapper(
        num_tokens=args.vocab, max_seq_len=args.seq_len, attn_layers=layers, tie_embedding=True,
        use_abs_pos_emb=False,
    )  # fmt: skip
    torch.nn.init.normal_(model.token_emb.emb.weight, std=0.02)
    return Peer(model)


def peers(names: list[str], args: Any) -> dict[str, nn.Module]:
    """Its plain model and those of our methods among `names` that it has; not installed: a line, and none."""
    if not installed("x_transformers"):
        return {}
    models = {"x-transformers": x_transformers(args)}
    return models | {f"x-transformers, {n}": x_transformers(args, **OURS[n]) for n in names if n in OURS}
