"""The depth axis: how the residual stream carries information from layer to layer."""

from twoaxis.depth.additive import Additive
from twoaxis.depth.attnres import AttnRes
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
from twoaxis.depth.denseformer import DenseFormer
from twoaxis.depth.depth_window import DepthWindow
from twoaxis.depth.history import History, named_tensors
from twoaxis.depth.hyper_connections import HyperConnections

__all__ = [
    "DCA",
    "DDL",
    "Additive",
    "AttnRes",
    "Connection",
    "DenseFormer",
    "DepthConfig",
    "DepthWindow",
    "History",
    "HyperConnections",
    "PlainStream",
    "Stream",
    "accepts_qkv",
    "build",
    "named_tensors",
    "qkv_index",
]
