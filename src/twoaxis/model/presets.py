"""Named points of the plane: one choice for each axis, to be given to `ModelConfig` or `twoaxis compare --preset`.

cfg = ModelConfig(**presets["ddl_short_swa"], d_model=256, n_blocks=12)
"""

from __future__ import annotations

from typing import TypedDict


class Preset(TypedDict):
    """The two choices of a model, as `ModelConfig` takes them."""

    depth: str
    sequence: list[str]


presets: dict[str, Preset] = {
    # the Transformer
    "standard": {"depth": "additive", "sequence": ["attention", "mlp"]},
    # the duality paper's Algorithm 1 (arXiv 2603.16039): a local mixer before the global one
    "local_to_global": {"depth": "additive", "sequence": ["short_swa(window=64)", "attention", "mlp"]},
    # and its advice: change the shortcut itself along depth, mix locally along the sequence
    "ddl_short_swa": {"depth": "ddl", "sequence": ["short_swa(window=64)", "attention", "mlp"]},
    # Algorithm 1 with what ShortSWA is said to succeed; give `--match parameters` to compare them
    "local_to_global_short_conv": {"depth": "additive", "sequence": ["short_conv", "attention", "mlp"]},
    "local_to_global_canon": {"depth": "additive", "sequence": ["canon", "attention", "mlp"]},
    # Canon layers where their authors put them (arXiv 2512.17351)
    "canon": {"depth": "additive", "sequence": ["canon(set='ABCD')"]},
}
