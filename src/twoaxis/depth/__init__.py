"""The depth axis: how the residual stream carries information from layer to layer."""

from twoaxis.depth.additive import Additive
from twoaxis.depth.attnres import AttnRes
from twoaxis.depth.axis_gate import AxisGate
from twoaxis.depth.connection import (
    Connection,
    DepthConfig,
    PlainStream,
    Stream,
    accepts_qkv,
    build,
    qkv_index,
)
from twoaxis.depth.dca import DCA
from twoaxis.depth.ddl import DDL
from twoaxis.depth.delta_attnres import DeltaAttnRes
from twoaxis.depth.denseformer import DenseFormer
from twoaxis.depth.depth_attention import DepthAttention
from twoaxis.depth.depth_conv import DepthConv
from twoaxis.depth.depth_window import DepthWindow
from twoaxis.depth.dynamic_window import DynamicWindow
from twoaxis.depth.elc_bert import ELCBert
from twoaxis.depth.history import History, named_tensors
from twoaxis.depth.hybrid import Hybrid
from twoaxis.depth.hyper_connections import HyperConnections
from twoaxis.depth.lime import LIMe
from twoaxis.depth.mhc import MHC
from twoaxis.depth.muddformer import MUDDFormer
from twoaxis.depth.residual_scalars import ResidualScalars
from twoaxis.depth.silu_increment import SiLUIncrement
from twoaxis.depth.svformer import SVFormer
from twoaxis.depth.value_residual import ValueResidual
from twoaxis.depth.vertical_attention import VerticalAttention

__all__ = [
    "DCA",
    "DDL",
    "MHC",
    "Additive",
    "AttnRes",
    "AxisGate",
    "Connection",
    "DeltaAttnRes",
    "DenseFormer",
    "DepthAttention",
    "DepthConfig",
    "DepthConv",
    "DepthWindow",
    "DynamicWindow",
    "ELCBert",
    "History",
    "Hybrid",
    "HyperConnections",
    "LIMe",
    "MUDDFormer",
    "PlainStream",
    "ResidualScalars",
    "SVFormer",
    "SiLUIncrement",
    "Stream",
    "ValueResidual",
    "VerticalAttention",
    "accepts_qkv",
    "build",
    "named_tensors",
    "qkv_index",
]
