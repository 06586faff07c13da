"""`twoaxis report FOLDER`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twoaxis.cli.main import main
from twoaxis.model import ModelConfig
from twoaxis.study import Study, compare, cross
from twoaxis.train import TrainConfig


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"{i}, {i % 5}.\n" for i in range(300)), encoding="utf-8")
    model = ModelConfig(d_model=16, n_blocks=1, n_heads=2)
    training = TrainConfig(model=model, data=str(tmp_path / "text.txt"), seq_len=16, batch_size=2, steps=3)
    compare(
        Study(rows=cross(["additive", "ddl"], [("attention", "mlp")]), training=training), tmp_path / "out"
    )
    return tmp_path / "out"


def test_report_is_rebuilt_and_shown(comparison: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (comparison / name).read_bytes() for name in ("results.json", "report.html")}
    for name in before:
        (comparison / name).unlink()
    assert main(["report", str(comparison)]) == 0
    assert {name: (comparison / name).read_bytes() for name in before} == before
    out = capsys.readouterr().out
    assert "ddl: no ranking" in out
    assert f"report: {comparison / 'report.html'}" in out


def test_json_is_the_results(comparison: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(comparison), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((comparison / "results.json").read_text())


def test_a_failed_run_in_the_folder_is_exit_code_1(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = comparison / "runs" / "ddl" / "seed-0" / "results.json"
    failed.write_text(json.dumps({"status": "failed", "error": "the loss is nan"}), encoding="utf-8")
    assert main(["report", str(comparison)]) == 1
    assert "ddl, seed 0 failed: the loss is nan" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [["report"], ["report", "here"], ["report", "a", "b"]], ids=["none", "other", "two"]
)
def test_bad_input_is_one_line_and_exit_2(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
