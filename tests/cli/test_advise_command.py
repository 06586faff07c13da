"""`twoaxis advise` as a command: words, JSON, a page, a calibration, claims; one line for what is impossible."""

import importlib
import json
import sys

import pytest

import twoaxis
from twoaxis.cli.main import main

TINY = ["advise", "--model", "tiny", "--hardware", "cpu"]


def test_words_and_table_name_the_choice_and_the_case_against_it(capsys):
    assert main(TINY) == 0
    said = capsys.readouterr().out
    for part in (
        "The paper",
        "taken",
        "Recommendation: ",
        "The strongest case against it: ",
        "settle it: twoaxis compare",
    ):
        assert part in said


def test_json_and_a_page_that_asks_nothing_of_the_network(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("twoaxis.study.advice_page.DEPTHS", (2, 4))
    monkeypatch.setattr("twoaxis.study.advice_page.CONTEXTS", (64, 256))
    path = tmp_path / "new" / "advice.html"
    assert main([*TINY, "--json", "--goal", "shortcut", "--html", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["request"]["goal"] == "shortcut"
    page = path.read_text(encoding="utf-8")
    assert data["recommendation"]["name"] in page
    assert page.count("<svg viewBox=") >= 4
    for word in ("http://", "https://", "<script", "{{"):
        assert word not in page


def test_a_measured_machine_is_found_again_as_here(capsys, tmp_path, monkeypatch):
    from twoaxis.cost.calibrate import calibrate

    module = sys.modules[calibrate.__module__]
    monkeypatch.setattr(module, "SECONDS", 1e-4)
    monkeypatch.setattr(module, "COPIES", (1 << 12,))
    monkeypatch.setattr(module, "PRODUCTS", ((16, 16, 16),))
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path))
    assert main(["advise", "--hardware", "here"]) == 2
    assert "run twoaxis advise --measure first" in capsys.readouterr().err
    assert main(["advise", "--measure"]) == 0
    assert "launch" in capsys.readouterr().out
    assert main(["advise", "--model", "tiny", "--hardware", "here", "--goal", "shortcut", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["hardware"] == "measured-cpu"


def test_claims_are_printed_with_verdicts(capsys):
    assert main(["advise", "--claims", "--json"]) == 0
    verdicts = {row["verdict"] for row in json.loads(capsys.readouterr().out)}
    assert {"does not hold", "untested", "depends"} <= verdicts


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--window", "9000"], "larger than the context of 256 tokens"),
        (["--mesh", "pp=4"], "pp=4 does not divide n_blocks=6"),
        (["--hardware", "h999"], "hardware 'h999' is not known"),
        (["--model", "gpt-9"], "model 'gpt-9' is not known"),
        (["--goal", "speed"], "goal 'speed' is not known"),
        (["--hardware", "m3-max", "--dtype", "bfloat16"], "no known bfloat16 matrix rate"),
        (["--mesh", "tp=2"], "no known bandwidth among 2 devices"),
        (["--seq-len", "0"], "seq_len=0: allowed is an integer of 1 or more"),
        (["--dtype", "float8"], "dtype='float8': allowed is"),
    ],
    ids=["window", "mesh", "hardware", "model", "goal", "dtype", "link", "tokens", "float8"],
)
def test_impossible_requests_get_one_line_and_exit_code_2(capsys, options, line):
    assert main([*TINY, *options]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "options", [["--html", "."], ["--html", "file/page.html"], ["--measure", "--out", "file/machine.json"]]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    capsys, tmp_path, monkeypatch, options
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name in ("advise", "calibrate"):
        monkeypatch.setattr(importlib.import_module(f"twoaxis.cost.{name}"), name, None)
    assert main([*TINY, *options]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_names_from_files_are_escaped_in_the_page(tmp_path, monkeypatch):
    """A machine's title, a result's source and a run's words come from files that others wrote."""
    monkeypatch.setattr("twoaxis.study.advice_page.DEPTHS", (2,))
    monkeypatch.setattr("twoaxis.study.advice_page.CONTEXTS", (64,))
    evil = "<script>alert(1)</script>"
    machine = {"name": evil, "title": evil, "matrix_tflops": {"float32": 1}, "memory_gb_per_s": 10}
    result = {"method": "ddl", "metric": evil, "value": 1, "baseline": 2, "better": "lower", "model": evil}
    result |= {"parameters": None, "tokens": None, "seeds": None, "who": "others", "source": evil}
    names = [("additive", "additive"), (evil, twoaxis.parse_spec("depth", "ddl").spec())]
    rows = [
        {"name": n, "depth": d, "sequence": ["attention", "mlp"], "valid_bits_per_byte": 2.0}
        for n, d in names
    ]
    verdicts = [{"row": evil, "call": "better", "words": evil}]
    runs = {"baseline": "additive", "rows": rows, "verdicts": verdicts}
    for name, data in (("m.json", machine), ("e.yaml", [result]), ("results.json", runs)):
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    files = ["--hardware", str(tmp_path / "m.json"), "--evidence", str(tmp_path / "e.yaml")]
    page = tmp_path / "page.html"
    assert main(["advise", "--model", "tiny", *files, "--runs", str(tmp_path), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;" in text
    assert "<script" not in text
