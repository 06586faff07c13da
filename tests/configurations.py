"""The configurations that registry-wide tests run over: every method of both axes, tiny, in odd sizes.

A method that registers itself joins with its defaults; VARIANTS adds option sets worth a run of their own.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from functools import cache
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
    "depth_window(heads=3, position='bias', injection='gated')",
    "depth_window(window_blocks=2, heads=2, position='rope', injection='replace', output=True)",
    "dynamic_window(form='gates', window_blocks=3, heads=3, position='bias', injection='gated')",
    "dynamic_window(window_blocks=2, ramp_blocks=2, shared=False, heads=2, position='rope', output=True)",
    "hybrid(window_blocks=2, gate='head', shared=False)",
    "hybrid(gate='channel', heads=3, axes='BSD')",
    "hybrid(axes='DSD', window_blocks=2)",
    "depth_attention(stride_attentions=2, recent_attentions=1)",
    "depth_conv(kernel=2, shared=False)",
    "dca(k=1)",
    "dca(k=1, middle='drop', grn='v2')",
    "dca(grn='v1')",
    "dca(gate_norm=True)",
    "hyper_connections(streams=1)",
    "hyper_connections(streams=2, dynamic=False)",
    "hyper_connections(streams=3, norm='rms', tanh=False)",
    "mhc(streams=1)",
    "mhc(streams=3, mixing='permutations', readout='head')",
    "mhc(streams=2, iterations=3, last='columns', eps=1e-3, start='random')",
    "mhc(dynamic=False, gates='softmax', write_scale=4.0)",
    "ddl(value_dim=4)",
    "ddl(value_dim=4, compressor='token')",
    "ddl(value_dim=2, compressor='free')",
    "ddl(value_dim=3, embed_conv=False, target_source='context', target_act='linear', target_bias=False)",
    "ddl(gate='mlp', gate_hidden=5, target_const=0.5, write_only=True)",
    "elc_bert(variant='base')",
    "elc_bert(variant='normalized')",
    "elc_bert(variant='weighted_output', normalize='none')",
    "vertical_attention(block_residual=False, source_norm='length')",
    "residual_scalars(scaled='sublayer')",
    "lime(start='standard')",
    "lime(kind='dynamic', views=3)",
    "lime(kind='dynamic', gate='relu')",
    "value_residual(form='constant')",
    "value_residual(form='sparse')",
    "value_residual(form='learnable', start='standard')",
    "value_residual(form='learnable_plus')",
    "value_residual(form='learnable_plus', start='standard')",
    "value_residual(form='gated')",
    "muddformer(ways=1, dynamic=False)",
    "muddformer(ways=2, expand_last=False)",
    "muddformer(ways=3, dynamic=False)",
    "muddformer(pre_post_norm=True, reallocate_mlp=True, round64=False)",
    "muddformer(pre_post_norm=True, pre_post_form='code', gelu='tanh')",
    "delta_attnres(form='block', source_blocks=1)",
    "delta_attnres(form='block', source_blocks=2, released=True, null_source=True)",
    "delta_attnres(null_source=True, gate='scalar')",
    "delta_attnres(gate='vector', key_gain=False)",
    "delta_attnres(pre_gated=True, value_read=True, null_source=True)",
    "delta_attnres(form='block', source_blocks=1, value_read=True, gate='scalar')",
    "delta_attnres(form='block', source_blocks=2, gate='alpha')",
    "denseformer(period=2, sources='period')",
    "attnres(heads=3)",
    "attnres(query='input', block_sublayers=2)",
    "attnres(key_rank=5, query='input')",
    "attnres(window_sources=2)",
    "attnres(window_sources=1, sink=False)",
    "attnres(window_sources=2, block_sublayers=2, key_rank=4)",
    "elc_bert(window_blocks=2, variant='weighted_output', normalize='none')",
    "vertical_attention(window_blocks=1)",
    "denseformer(window_blocks=2)",
    "muddformer(window_blocks=1, ways=2)",
    "delta_attnres(window_sources=2)",
    "delta_attnres(form='block', source_blocks=1, released=True, window_sources=1)",
]
SEQUENCES: dict[str, list[Any]] = {
    "standard": ["attention", "mlp"],
    "local to global": ["short_swa(window=3)", "attention", "mlp"],
    "parallel": ["parallel(attention, mlp)"],
    "local": ["short_swa(window=2)", "mlp"],
    "grouped": ["attention(n_heads=2, n_kv_heads=1, qk_norm=True)", "mlp(act='gelu')"],
    "bias and sink": ["short_swa(window=3, position='bias', sink=True)", "mlp(hidden=5)"],
    "pattern": ["attention(window=3, pattern='SL')", "mlp"],
    "canon": ["canon(set='ABCD', start='zero')"],
    "convolutions": [
        "short_conv(form='lfm2', kernel=3, bias=True)",
        "attention(q='short_conv(bias=True)', v='token_shift', qk_norm='full', rope_dims=2)",
        "mlp(hidden=5, act='gelu', hidden_input='canon(kernel=2)')",
    ],
    "chunks": ["short_swa(window=3, field='two_chunk', value='identity', head_dim=2)", "mlp(hidden=5)"],
    "sink tokens": [
        "short_swa(window=3, field='chunk', sink_tokens=2, value='key', output='identity')",
        "mlp(hidden=5)",
    ],
    "local mixers inside": [
        "attention(window=3, v='residual(short_swa(window=2))', qkv='canon(kernel=3)', input='token_shift')",
        """mlp(hidden=4, input="short_swa(window=2, sink_tokens=1)")""",
    ],
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
    """One point of the cross product. `sequence` is a key of SEQUENCES; `window` replaces every window in it."""

    depth: str
    sequence: str = "standard"
    window: int | None = None

    def __str__(self) -> str:
        return f"{self.depth} - {self.sequence}" + (f" - w={self.window}" if self.window else "")

    def config(self, **fields: Any) -> twoaxis.ModelConfig:
        n_blocks = fields.pop("n_blocks", BLOCKS)
        blocks = SEQUENCES[self.sequence]
        if isinstance(blocks[0], list):
            blocks = blocks[:n_blocks]
        if self.window is not None:
            text = re.sub(r"window=\d+", f"window={self.window}", json.dumps(blocks))
            blocks = json.loads(text)
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


@cache
def fits(case: Case) -> bool:
    """Whether the depth method takes these blocks: some need separate q, k, v inputs, or attentions alike."""
    try:
        twoaxis.cost(case.config(), 1, 1)
    except twoaxis.InputError:
        return False
    return True


def pairwise() -> list[Case]:
    """Each depth method with two sequences, each variant with one; each sequence meets several methods."""
    names, known = list(SEQUENCES), len(twoaxis.methods("depth"))

    def one(depth: str, place: int) -> Case:
        turned = names[place % len(names) :] + names[: place % len(names)]
        return next(case for name in turned if fits(case := Case(depth, name)))

    cases = [one(depth, i) for i, depth in enumerate(depths())]
    return cases + [one(depth, i + len(names) // 2) for i, depth in enumerate(depths()[:known])]


def whole() -> list[Case]:
    return [case for depth in depths() for name in SEQUENCES if fits(case := Case(depth, name))]
