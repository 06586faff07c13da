"""The model: both axes put together."""

from twoaxis.model.block import Block
from twoaxis.model.compiled import compiled_step
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder, token_loss
from twoaxis.model.files import load, load_weights, read_safetensors, save, write_atomically
from twoaxis.model.generate import choose, evaluating, generate

__all__ = [
    "Block",
    "Decoder",
    "ModelConfig",
    "choose",
    "compiled_step",
    "evaluating",
    "generate",
    "load",
    "load_weights",
    "read_safetensors",
    "save",
    "token_loss",
    "write_atomically",
]
