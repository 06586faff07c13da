"""The files of `benchmarks` and its page: each is named there, what is named is there, and tables can be printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import operators

FOLDER = Path(__file__).parents[2] / "benchmarks"
OF_OPERATORS = sorted(path.name for path in FOLDER.glob("operators_*.json"))


def test_every_result_is_named_and_every_name_is_a_file() -> None:
    page = (FOLDER / "RESULTS.md").read_text()
    named = set(re.findall(r"(?:benchmarks/|`)(\w+\.json)", page))
    assert named == {path.name for path in FOLDER.glob("*.json")}
    for script in re.findall(r"benchmarks/(\w+\.py)", page):
        assert (FOLDER / script).is_file()


@pytest.mark.parametrize("name", OF_OPERATORS)
def test_a_file_of_operators_is_printed_as_a_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["operators.py", "--table", "--json", str(FOLDER / name)])
    operators.main()
    cases = json.loads((FOLDER / name).read_text())["cases"]
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(cases)
    assert all(re.search(r"again \d\.\d\d \(", row) for row in rows)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--table"], "--table prints the file that --json names: name one that is there"),
        (["--table", "--json", "nowhere.json"], "name one that is there"),
        (["--only", "sum"], "invalid choice: 'sum'"),
    ],
    ids=["no file", "a file that is not there", "a kind that is none"],
)
def test_bad_flags_are_one_line(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["operators.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        operators.main()
    assert said in capsys.readouterr().err.splitlines()[-1]
