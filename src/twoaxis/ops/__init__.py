"""Pure functions on tensors: the operators that the methods of both axes are made of.

Every fast path has a plain twin of the same name and signature in `twoaxis.ops.reference`.
"""

from . import reference
from .causal_conv import depthwise_causal_conv
from .channel_read import channel_read
from .conventions import CONVENTIONS, window_for, window_from
from .delta_rewrite import delta_rewrite
from .depth_read import depth_read
from .gated_mix import gated_mix
from .head_mix import head_mix, head_rows
from .local_attention import local_attention
from .mix import mix
from .norm import add_rms_norm, rms, rms_norm
from .rotate import rotate
from .sinkhorn import permutation_matrices, permutation_mix, sinkhorn, sinkhorn_error
from .stream_gates import hyper_gates, mhc_gates
from .stream_pass import hyper_pass, mhc_pass
from .stream_scores import joint_scores, stream_scores
from .streams import stream_read, stream_write
from .swiglu import swiglu
from .token_loss import token_loss
from .token_mix import token_mix
from .window import check_window, visible, visible_pairs

__all__ = [
    "CONVENTIONS",
    "add_rms_norm",
    "channel_read",
    "check_window",
    "delta_rewrite",
    "depth_read",
    "depthwise_causal_conv",
    "gated_mix",
    "head_mix",
    "head_rows",
    "hyper_gates",
    "hyper_pass",
    "joint_scores",
    "local_attention",
    "mhc_gates",
    "mhc_pass",
    "mix",
    "permutation_matrices",
    "permutation_mix",
    "reference",
    "rms",
    "rms_norm",
    "rotate",
    "sinkhorn",
    "sinkhorn_error",
    "stream_read",
    "stream_scores",
    "stream_write",
    "swiglu",
    "token_loss",
    "token_mix",
    "visible",
    "visible_pairs",
    "window_for",
    "window_from",
]
