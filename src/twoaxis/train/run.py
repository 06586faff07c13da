"""A run folder: config.yaml, tokenizer.json, metrics.jsonl, checkpoints, results.json."""

from __future__ import annotations

from pathlib import Path

from twoaxis.data import Tokenizer
from twoaxis.model import Decoder
from twoaxis.train.config import TrainConfig


def load_run(folder: str | Path) -> tuple[Decoder, Tokenizer, TrainConfig]:
    """The model of the newest complete checkpoint (float32, on the CPU, in eval mode), its tokeniser and config."""
    raise NotImplementedError
