"""`twoaxis compare` from the command line."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from twoaxis import presets
from twoaxis.cli.compare import Args, command_of, study_of
from twoaxis.cli.live import Live, Log
from twoaxis.cli.main import main
from twoaxis.errors import InputError
from twoaxis.study import Event, preset

STUDY = """
depth: [additive, denseformer]
train:
  data: {data}
  seq_len: 16
  batch_size: 2
  steps: 3
  warmup_steps: 1
  model: {{d_model: 16, n_blocks: 2, n_heads: 2}}
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i % 7}.\n" for i in range(400)), encoding="utf-8")
    (tmp_path / "study.yaml").write_text(STUDY.format(data=tmp_path / "text.txt"), encoding="utf-8")
    return tmp_path / "study.yaml"


def test_a_study_runs_and_reports_in_plain_lines(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", str(study), "--out", str(out)]) == 0
    table, lines = capsys.readouterr()
    assert "\x1b" not in table + lines
    assert "[1/2] additive, seed 0: 3 steps" in lines
    assert "[2/2] denseformer, seed 0: done, validation" in lines
    assert "measuring speed and memory, turn 5/5" in lines
    for words in ("bits per byte", "saved for backward", "denseformer: no ranking: one seed", "--seeds 3"):
        assert words in table
    assert f"report: {out / 'report.html'}" in table
    results = json.loads((out / "results.json").read_text())
    assert results["command"] == "twoaxis compare study.yaml"
    assert str(tmp_path) not in (out / "report.html").read_text()


def test_json_is_the_results(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        main(["compare", str(study), "--depth", "additive", "--steps", "2", "--out", str(out), "--json"]) == 0
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "results.json").read_text())
    assert printed["study"]["train"]["steps"] == 2


def test_a_failed_run_is_exit_code_1(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = "rows:\n- {name: plain, depth: additive}\n- {name: wild, depth: additive, train: {lr: 1.0e+30}}\n"
    study.write_text(study.read_text(encoding="utf-8").replace("depth: [additive, denseformer]\n", wild))
    assert main(["compare", str(study), "--out", str(tmp_path / "o")]) == 1
    table, lines = capsys.readouterr()
    assert "Traceback" not in table + lines
    assert "[1/2] plain, seed 0: done" in lines
    assert "[2/2] wild, seed 0: failed: " in lines
    assert "wild, seed 0 failed: " in table


def test_a_row_that_cannot_be_built_is_refused_first(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # DCA needs a sublayer that takes q, k, v of its own
    argv = [
        "compare",
        str(study),
        "--depth",
        "additive",
        "dca",
        "--sequence",
        "mlp",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "dca makes separate q, k, v inputs" in said
    assert not (tmp_path / "o" / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--depth", "aditive"], ["'aditive'", "did you mean 'additive'"], id="method"),
        pytest.param(["--sequence", "atention,mlp"], ["did you mean 'attention'"], id="sublayer"),
        pytest.param(["--sequence", "attention,(mlp"], ["cannot be read"], id="brackets"),
        pytest.param(["--seeds", "0"], ["seeds=0", "1 or more"], id="seeds"),
        pytest.param(["--match", "width,flops"], ["--match", "'parameters'"], id="match"),
        pytest.param(["--steps", "0"], ["steps=0", "1 or more"], id="steps"),
        pytest.param(["--steps", "-3"], ["steps=-3", "1 or more"], id="negative-steps"),
        pytest.param(["ddl"], ["no study file ddl", "--depth ddl"], id="file"),
        pytest.param(["--seed", "3"], ["--seed", "--seeds"], id="option"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    argv: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *argv, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


def test_unknown_data_fail_as_bad_input(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["compare", str(study), "--data", "shakespear", "--out", str(tmp_path / "out")]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "did you mean 'shakespeare'" in err


def test_options_override_the_file_and_the_preset() -> None:
    args = Args(depth=("additive", "ddl"), seeds=(3,), match="parameters", steps=60, data="pydocs", out="x")
    study, base = study_of(args), preset()
    assert [row.depth for row in study.rows] == ["additive", "ddl"]
    assert (study.seeds, study.match, study.out) == ((0, 1, 2), "parameters", "x")
    assert (study.training.steps, study.training.data) == (60, "pydocs")
    assert study.training.model == base.training.model
    assert study_of(Args()) == base
    assert study_of(Args(seeds=(4, 9))).seeds == (4, 9)


def test_presets_are_rows_by_name() -> None:
    rows = study_of(Args(preset=("standard", "ddl_short_swa"))).rows
    assert [(r.name, r.depth, list(r.sequence)) for r in rows] == [
        ("standard", "additive", ["attention", "mlp"]),
        ("ddl_short_swa", "ddl", ["short_swa(window=64)", "attention", "mlp"]),
    ]
    both = Args(depth=("additive", "mhc"), preset=("local_to_global",))
    assert [r.name for r in study_of(both).rows] == ["additive", "mhc", "local_to_global"]
    assert command_of(both) == "twoaxis compare --depth additive mhc --preset local_to_global"
    with pytest.raises(InputError, match="did you mean 'ddl_short_swa'"):
        study_of(Args(preset=("ddl_shortswa",)))


def test_help_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help"]) == 0
    told = set(re.findall(r"\w+", capsys.readouterr().out))
    assert set(presets) <= told


def test_the_reported_command_has_bare_names_and_no_output_folder() -> None:
    args = Args(
        study=Path("/somewhere/mine.yaml"),
        depth=("ddl(value_dim=4)",),
        seeds=(3,),
        data="/data/text.txt",
        out="/elsewhere/x",
    )
    expected = "twoaxis compare mine.yaml --depth 'ddl(value_dim=4)' --seeds 3 --data text.txt"
    assert command_of(args) == expected


STEP = {"step": 3, "tokens": 96, "seconds": 2.0, "loss": 2.5}
EVENTS = [
    Event("start", "DDL", 0, 5, 6, {"steps": 10}),
    Event("step", "DDL", 0, 5, 6, STEP | {"val_bits_per_byte": 3.25}),
    Event("failed", "DenseFormer", 0, 2, 6, {"error": "loss is nan [at] step 4"}),
    Event("done", "block AttnRes", 0, 3, 6, {"valid_bits_per_byte": 2.875}),
    Event("skipped", "Hyper-Connections", 0, 4, 6, {"valid_bits_per_byte": None}),
    Event("measuring", number=1, total=5),
    Event("written", data={"report": "report.html"}),
]


def test_live_table_has_a_line_per_row() -> None:
    from rich.console import Console

    live, text = Live(preset()), io.StringIO()
    for event in EVENTS:
        live(event)
    Console(file=text, width=140, force_terminal=False).print(live._table())
    lines = text.getvalue().splitlines()

    def line(name: str) -> str:
        return next(line for line in lines if f" {name} " in line)

    assert "3/10" not in line("DDL")  # the study's number of steps, not the event's
    assert f"3/{preset().training.steps}" in line("DDL")
    assert "validation 3.250" in line("DDL")
    assert "48" in line("DDL")  # tokens per second
    assert "failed: loss is nan [at] step 4" in line("DenseFormer")
    assert "validation 2.875" in line("block AttnRes")
    assert "already done" in line("Hyper-Connections")
    assert "waiting" in line("local-to-global block")


def test_log_lines_are_rare_within_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 101.0, 109.9, 110.1, 111.0])
    monkeypatch.setattr("twoaxis.cli.live.time.monotonic", lambda: next(clock))
    log = Log(preset())
    steps: list[dict[str, Any]] = [STEP | {"step": step} for step in (1, 2, 3)]
    for event in (EVENTS[0], *(Event("step", "DDL", 0, 5, 6, step) for step in steps), EVENTS[3]):
        log(event)
    assert capsys.readouterr().err.splitlines() == [
        "[5/6] DDL, seed 0: 10 steps",
        f"[5/6] DDL, seed 0: step 3/{preset().training.steps}, loss 2.500",
        "[3/6] block AttnRes, seed 0: done, validation 2.875 bits per byte",
    ]
