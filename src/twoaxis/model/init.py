"""How a model's weights start, in one place.

| parameters                                     | init                                                       |
|------------------------------------------------|------------------------------------------------------------|
| embeddings, untied head                        | N(0, init_std^2)                                           |
| matrices of cores                              | N(0, init_std^2)                                           |
| output projections of cores (they write to the | N(0, (init_std / sqrt(number of sublayers) * s)^2), s asked |
| residual stream)                               | for by the depth method (`core_options`), 1 by default     |
| norm gains                                     | 1                                                          |
| everything a depth method owns                 | as its own file says                                       |

The scaled output projections are those of GPT-2 (one residual addition per sublayer).
"""

from __future__ import annotations

import math

from torch import nn

from twoaxis.sequence.mixer import Mixer
from twoaxis.types import Layout


def init_embedding(table: nn.Embedding | nn.Linear, layout: Layout) -> None:
    """Start an embedding table or head."""
    nn.init.normal_(table.weight, std=layout.init_std)


def init_core(core: Mixer, layout: Layout) -> None:
    """Start every matrix of a core, nested cores included."""
    for module in core.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=layout.init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in core.modules():
        if isinstance(module, Mixer):
            for layer in module.output_layers():
                sums = layout.n_sublayers if module.writes_stream else 1
                std = layout.init_std / math.sqrt(sums) * module.output_scale
                nn.init.normal_(layer.weight, std=std)
