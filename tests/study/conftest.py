"""A tiny study on a made-up text."""

from __future__ import annotations

from pathlib import Path

import pytest

from twoaxis.model import ModelConfig
from twoaxis.study import Study, cross
from twoaxis.train import TrainConfig


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def training(tmp_path: Path) -> TrainConfig:
    text = "".join(f"{i} and {i * i % 97}, then {i % 7}.\n" for i in range(300))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    model = ModelConfig(d_model=16, n_blocks=2, n_heads=2)
    return TrainConfig(
        model=model,
        data=str(tmp_path / "text.txt"),
        seq_len=16,
        batch_size=2,
        steps=4,
        warmup_steps=1,
        eval_every=2,
    )


@pytest.fixture
def study(training: TrainConfig, tmp_path: Path) -> Study:
    rows = cross(["additive", "denseformer"], [("attention", "mlp")])
    return Study(rows=rows, training=training, out=str(tmp_path / "out"))
