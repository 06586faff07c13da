"""A benchmark that runs again into its file leaves what other settings have made, and says which peers it lacks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import decoding
import operators
import overhead
import packages
import steps

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *flags])
    module.main()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    packages.say_left_out.cache_clear()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the committed steps; rows are made up from now on."""
    made = tmp_path / "steps.json"
    made.write_bytes((FOLDER / "steps.json").read_bytes())

    def rounds_of(given: dict[str, Any], rounds: int) -> list[dict[str, float]]:
        return [dict.fromkeys(given, 1.0)] * rounds

    monkeypatch.setattr(steps, "ours", lambda depth, args: torch.nn.Linear(1, 1))
    monkeypatch.setattr(steps, "rounds_of", rounds_of)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    return made


def test_steps_keep_tables_of_the_same_shape(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads(file.read_text())["tables"]
    run(steps, monkeypatch, "--rows", "ddl", "--code", "today", "--json", str(file))
    *kept, fresh = json.loads(file.read_text())["tables"]
    assert kept == before  # three of them have this shape
    assert fresh["shape"] == before[0]["shape"]
    assert fresh["code"] == "today"
    assert [row["method"] for row in fresh["rows"]] == ["additive", "additive, again", "ddl"]
    run(steps, monkeypatch, "--rows", "lime", "--code", "today", "--json", str(file))
    run(steps, monkeypatch, "--rows", "ddl", "--rounds", "2", "--code", "today", "--json", str(file))
    *kept, fresh = json.loads(file.read_text())["tables"]
    assert kept == before
    assert {row["method"]: row["rounds"] for row in fresh["rows"] if row["method"] in ("ddl", "lime")} == {
        "ddl": 2,
        "lime": 5,
    }
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    run(steps, monkeypatch, "--rows", "ddl", "--code", "today", "--json", str(file))
    assert json.loads(file.read_text())["tables"][:-1] == [*before, fresh]


@pytest.mark.usefixtures("bare")
def test_steps_note_the_peers_that_are_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rows", "ddl", "lime", "--group", "1", "--peers", "--code", "today", "--json", str(file)]
    run(steps, monkeypatch, *flags)
    assert capsys.readouterr().err == "left out: x_transformers (not installed)\n"
    assert json.loads(file.read_text())["tables"][-1]["left out"] == ["x-transformers"]
    monkeypatch.setattr(steps, "peers", lambda names, args: {"x-transformers": torch.nn.Linear(1, 1)})
    run(steps, monkeypatch, *flags)
    assert "left out" not in json.loads(file.read_text())["tables"][-1]


def test_rows_of_decoding_keep_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "decoding.json"
    file.write_bytes((FOLDER / "decoding.json").read_bytes())
    before = json.loads(file.read_text())
    row = {"row": "A/A", "batch": 1, "ratio": 1.5}
    report = {"shape": before["shape"], "prompt": 8, "new": 12, "torch": before["torch"], "rows": [row]}
    decoding.write(file, {**report, "new": 48})
    longer = json.loads(file.read_text())
    assert longer == {**before, "rows": [*before["rows"], {**row, "new": 48}]}
    decoding.write(file, report)
    again = json.loads(file.read_text())["rows"]
    assert again == [*(r for r in longer["rows"] if r != before["rows"][0]), row]  # its own row alone


@pytest.mark.usefixtures("bare")
def test_decoding_notes_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoding, "ours", lambda shape, tokens, new, depth="": lambda: 1.0)
    file = tmp_path / "decoding.json"
    run(decoding, monkeypatch, "--tiny", "--part", "peers", "--batch", "1", "8", "--json", str(file))
    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "left out: transformers",
        "left out: litgpt",
    ]
    found = json.loads(file.read_text())["left out"]
    assert found == [f"{peer} / twoaxis, batch {n}" for n in (1, 8) for peer in ("transformers", "litgpt")]


def test_a_file_of_another_dtype_or_backend_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.json"
    file.write_text(json.dumps({"dtype": "bfloat16", "cases": {"one": {}}}))
    monkeypatch.setattr(operators, "KEEP", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit, match="2"):
        run(operators, monkeypatch, "--json", str(file))
    assert "has cases of bfloat16, not of float32: name another file" in capsys.readouterr().err
    overhead.write(file, {"6 ddl": {}})
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    with pytest.raises(SystemExit, match="has rows of backend auto, not plain: name another file"):
        overhead.measure(file, 6, ["ddl"], 5, group=2)


def test_a_case_names_who_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.json"
    monkeypatch.setattr(operators, "KEEP", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(operators, "cases", lambda *_: [("one", {"ours": list, "peer": None})])
    run(operators, monkeypatch, "--only", "sums", "--rounds", "1", "--json", str(file))
    assert json.loads(file.read_text())["cases"]["one"]["left out"] == ["peer"]
    capsys.readouterr()
    run(operators, monkeypatch, "--table", "--json", str(file))
    assert "peer not installed" in capsys.readouterr().out.splitlines()[-1]
