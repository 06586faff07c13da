"""The model: both axes put together."""

from twoaxis.model.block import Block
from twoaxis.model.compiled import compiled_step
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.files import load, load_weights, read_safetensors, save, weights_path, write_atomically
from twoaxis.model.freeze import axis_shares, freeze_axes
from twoaxis.model.generate import generate, generate_stream, generate_text
from twoaxis.model.loss import chunked_token_loss
from twoaxis.model.modes import evaluating
from twoaxis.model.presets import presets
from twoaxis.model.sampling import choose, penalised
from twoaxis.model.text import TextStream
from twoaxis.model.windows import depth_windows, expected_depth
from twoaxis.ops import token_loss

__all__ = [
    "Block",
    "Decoder",
    "ModelConfig",
    "TextStream",
    "axis_shares",
    "choose",
    "chunked_token_loss",
    "compiled_step",
    "depth_windows",
    "evaluating",
    "expected_depth",
    "freeze_axes",
    "generate",
    "generate_stream",
    "generate_text",
    "load",
    "load_weights",
    "penalised",
    "presets",
    "read_safetensors",
    "save",
    "token_loss",
    "weights_path",
    "write_atomically",
]
