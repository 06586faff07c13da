"""The papers' equations in plain PyTorch: the oracle of every fast path, in any float dtype, on any device.

Same names and signatures as `twoaxis.ops`. Memory and speed do not matter here; double backward works.
"""

from .model import add_rms_norm, rms, rms_norm, rotate, swiglu, token_loss
from .reads import depth_read, gated_mix, head_mix, mix, token_mix
from .streams import (
    channel_read,
    delta_rewrite,
    hyper_gates,
    hyper_pass,
    joint_scores,
    mhc_gates,
    mhc_pass,
    sinkhorn,
    stream_read,
    stream_scores,
    stream_write,
)
from .tokens import depthwise_causal_conv, local_attention
from .update import adamw

__all__ = [
    "adamw",
    "add_rms_norm",
    "channel_read",
    "delta_rewrite",
    "depth_read",
    "depthwise_causal_conv",
    "gated_mix",
    "head_mix",
    "hyper_gates",
    "hyper_pass",
    "joint_scores",
    "local_attention",
    "mhc_gates",
    "mhc_pass",
    "mix",
    "rms",
    "rms_norm",
    "rotate",
    "sinkhorn",
    "stream_read",
    "stream_scores",
    "stream_write",
    "swiglu",
    "token_loss",
    "token_mix",
]
