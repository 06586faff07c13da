"""Depth specs (the defaults of every registered method, and variants) and block lists of odd sizes."""

from __future__ import annotations

import twoaxis

VARIANTS = [
    "denseformer(dilation=2, period=3)",
    "attnres(block_sublayers=3)",
    "attnres(readout='sum', key_gain=False)",
    "hyper_connections(streams=1)",
    "hyper_connections(streams=3, dynamic=False)",
    "ddl(value_dim=4)",
    "depth_window(window_blocks=2)",
    "depth_window(shared=False)",
]


def name_of(spec: str) -> str:
    return spec.split("(")[0]


DEPTHS = [*twoaxis.methods("depth"), *(s for s in VARIANTS if name_of(s) in twoaxis.methods("depth"))]

SEQUENCES = {
    "standard": ["attention", "mlp"],
    "gqa, qk-norm": ["attention(n_heads=4, n_kv_heads=2, qk_norm=True)", "mlp(act='gelu')"],
    "local to global": ["short_swa(window=5)", "attention", "mlp(hidden=7)"],
    "bias and sink": ["short_swa(window=3, position='bias', sink=True)", "mlp"],
    "pattern": ["attention(window=4, pattern='SL')", "mlp"],
    "parallel": ["parallel(attention, mlp)"],
    "one list per block": [
        ["attention"],
        ["mlp", "short_swa(window=40)"],
        ["parallel(short_swa, mlp)", "mlp"],
    ],
}


def config(
    depth: str = "additive", sequence: str | list = "standard", **fields: object
) -> twoaxis.ModelConfig:
    """A tiny model; `sequence` is a key of SEQUENCES or a block list."""
    blocks = SEQUENCES[sequence] if isinstance(sequence, str) else sequence
    given = {"vocab_size": 37, "d_model": 24, "n_blocks": 3, "n_heads": 2, "depth": depth}
    return twoaxis.ModelConfig(**{**given, "sequence": blocks, **fields})  # type: ignore[arg-type]
