"""The configurations that registry-wide tests run over: every method of both axes, tiny, in odd sizes.

A method that registers itself joins with its defaults; VARIANTS adds option sets worth a run of their own.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import twoaxis

VARIANTS = [
    "denseformer(dilation=2)",
    "denseformer(period=2)",
    "attnres(block_sublayers=3)",
    "attnres(readout='sum', scale_eps=False)",
    "attnres(key_gain=False)",
    "depth_window(window_blocks=1)",
    "depth_window(window_blocks=2, shared=False)",
    "depth_window(output=True)",
    "dca(k=1)",
    "dca(k=1, middle='drop', grn='v2')",
    "dca(grn='v1')",
    "dca(gate_norm=True)",
    "hyper_connections(streams=1)",
    "hyper_connections(streams=2, dynamic=False)",
    "hyper_connections(streams=3, norm='rms', tanh=False)",
    "ddl(value_dim=4)",
    "ddl(value_dim=4, compressor='token')",
    "ddl(value_dim=3, embed_conv=False, target_source='context', target_act='linear', target_bias=False)",
    "ddl(gate='mlp', gate_hidden=5, target_const=0.5, write_only=True)",
    "elc_bert(variant='base')",
    "elc_bert(variant='normalized')",
    "elc_bert(variant='weighted_output', normalize='none')",
    "vertical_attention(block_residual=False, source_norm='length')",
    "residual_scalars(scaled='sublayer')",
    "lime(start='standard')",
    "lime(kind='dynamic')",
    "lime(kind='dynamic', gate='relu')",
    "value_residual(form='constant')",
    "value_residual(form='sparse')",
    "value_residual(form='learnable', start='standard')",
    "value_residual(form='learnable_plus')",
    "value_residual(form='gated')",
]
SEQUENCES: dict[str, list[Any]] = {
    "standard": ["attention", "mlp"],
    "local to global": ["short_swa(window=3)", "attention", "mlp"],
    "parallel": ["parallel(attention, mlp)"],
    "local": ["short_swa(window=2)", "mlp"],
    "grouped": ["attention(n_heads=2, n_kv_heads=1, qk_norm=True)", "mlp(act='gelu')"],
    "bias and sink": ["short_swa(window=3, position='bias', sink=True)", "mlp(hidden=5)"],
    "pattern": ["attention(window=3, pattern='SL')", "mlp"],
    "list per block": [
        ["attention", "mlp"],
        ["short_swa(window=2)", "parallel(attention, mlp)"],
        ["mlp", "short_swa(window=4, position='none', start='zero')", "mlp"],
    ],
}
VOCAB, WIDTH, BLOCKS = 11, 12, 3


def method_of(spec: str) -> str:
    return spec.split("(")[0]


@dataclass(frozen=True)
class Case:
    """One point of the cross product. `sequence` is a key of SEQUENCES."""

    depth: str
    sequence: str = "standard"

    def __str__(self) -> str:
        return f"{self.depth} - {self.sequence}"

    def config(self, **fields: Any) -> twoaxis.ModelConfig:
        n_blocks = fields.pop("n_blocks", BLOCKS)
        blocks = SEQUENCES[self.sequence]
        if isinstance(blocks[0], list):
            blocks = blocks[:n_blocks]
        given = {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": 2, "depth": self.depth, "sequence": blocks}
        return twoaxis.ModelConfig(**{**given, "n_blocks": n_blocks, **fields})

    def fresh(self, seed: int = 0, **fields: Any) -> twoaxis.Decoder:
        """A model as it starts, in float32."""
        torch.manual_seed(seed)
        return twoaxis.Decoder(self.config(**fields))

    def model(self, dtype: torch.dtype = torch.float64, **fields: Any) -> twoaxis.Decoder:
        """A model at a random point."""
        return perturb(self.fresh(**fields).to(dtype))


def perturb(model: nn.Module, scale: float = 0.3) -> Any:
    """Add noise to every parameter; parameters of one name and shape get the same noise in every model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=seed, dtype=torch.float64)
            parameter += scale * noise.to(parameter.dtype)
    return model


def tokens(batch: int = 2, length: int = 13, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def depths() -> list[str]:
    """Every registered depth method with its defaults, then the variants of those that exist."""
    known = twoaxis.methods("depth")
    return [*known, *(v for v in VARIANTS if method_of(v) in known)]


def pairwise() -> list[Case]:
    """Each depth method with two sequences, each variant with one; each sequence meets several methods."""
    names, known = list(SEQUENCES), len(twoaxis.methods("depth"))
    cases = [Case(depth, names[i % len(names)]) for i, depth in enumerate(depths())]
    return cases + [
        Case(depth, names[(i + len(names) // 2) % len(names)]) for i, depth in enumerate(depths()[:known])
    ]


def whole() -> list[Case]:
    return [Case(depth, sequence) for depth in depths() for sequence in SEQUENCES]
