"""The sequence axis: how a layer mixes information between positions."""

from twoaxis.sequence.attention import Attention, AttentionConfig, SoftmaxAttention
from twoaxis.sequence.mixer import Mixer, SequenceConfig
from twoaxis.sequence.mlp import MLP
from twoaxis.sequence.parallel import Parallel
from twoaxis.sequence.short_swa import ShortSWA

__all__ = [
    "MLP",
    "Attention",
    "AttentionConfig",
    "Mixer",
    "Parallel",
    "SequenceConfig",
    "ShortSWA",
    "SoftmaxAttention",
]
