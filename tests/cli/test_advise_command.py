"""`twoaxis advise` as a command: words, JSON, a page, a calibration, claims; one line for what is impossible."""

import json
import sys

import pytest

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
