"""Tiny runs on a tiny text."""

import random

import pytest

from twoaxis import ModelConfig
from twoaxis.train import TrainConfig

MODEL = {"d_model": 16, "n_blocks": 2, "n_heads": 2, "dropout": 0.1}
RUN = {"seq_len": 12, "batch_size": 2, "steps": 6, "warmup_steps": 3, "valid_fraction": 0.1}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 2000 bytes in 40 lines, of which 200 are for validation."""
    words = random.Random(0)
    lines = ["".join(words.choices("abcdefgh ", k=49)) + "\n" for _ in range(40)]
    path = tmp_path_factory.mktemp("text") / "tiny.txt"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(autouse=True, scope="session")
def token_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOAXIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def tiny(text):
    """Makes a small TrainConfig; fields of the model go into `model`."""

    def make(model=None, **run):
        return TrainConfig(model=ModelConfig(**MODEL | (model or {})), **{"data": str(text)} | RUN | run)

    return make
