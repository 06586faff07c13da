"""The sequence axis: how a layer mixes information between positions."""

from twoaxis.sequence.attention import Attention, SoftmaxAttention
from twoaxis.sequence.attention_config import AttentionConfig
from twoaxis.sequence.canon import Canon
from twoaxis.sequence.local_to_global import LocalToGlobal
from twoaxis.sequence.mixer import Mixer, SequenceConfig
from twoaxis.sequence.mlp import MLP
from twoaxis.sequence.parallel import Parallel
from twoaxis.sequence.preset import carried_out
from twoaxis.sequence.residual import Residual
from twoaxis.sequence.short_conv import ShortConv
from twoaxis.sequence.short_swa import ShortSWA
from twoaxis.sequence.token_shift import TokenShift

__all__ = [
    "MLP",
    "Attention",
    "AttentionConfig",
    "Canon",
    "LocalToGlobal",
    "Mixer",
    "Parallel",
    "Residual",
    "SequenceConfig",
    "ShortConv",
    "ShortSWA",
    "SoftmaxAttention",
    "TokenShift",
    "carried_out",
]
