"""The studies that are committed: their files can be run, and their pages say what their results say."""

import json
from pathlib import Path

import pytest

import twoaxis
from twoaxis.study.file import read_study

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("file", sorted(STUDIES.rglob("*.yaml")), ids=lambda f: str(f.relative_to(STUDIES)))
def test_every_study_can_be_built(file):
    study = read_study(file)
    assert study.out.startswith("runs/")  # ignored by git


def test_one_study_holds_every_method():
    rows = read_study(STUDIES / "every_method.yaml").rows
    assert {row.depth.split("(")[0] for row in rows} == set(twoaxis.methods("depth"))
    blocks = str([row.sequence for row in rows])
    assert [name for name in twoaxis.methods("sequence") if name not in blocks] == []


def test_the_pilot_says_what_was_measured():
    page = (STUDIES / "pilot" / "README.md").read_text()
    results = json.loads((STUDIES / "pilot" / "results.json").read_text())
    table = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ][2:]
    judged = [None, *results["verdicts"]]
    assert len(table) == len(results["rows"]) == len(judged) == 9
    for (_, score, difference, p, call), row, verdict in zip(table, results["rows"], judged, strict=True):
        assert score == f"{row['valid_bits_per_byte']:.3f} ± {row['spread']:.3f}"
        assert len(row["runs"]) == 3
        if verdict:
            assert verdict["row"] == row["name"]
            interval = f"({verdict['low']:+.3f} to {verdict['high']:+.3f})"
            assert difference == f"{verdict['difference']:+.3f} {interval}"
            assert p == f"{verdict['p']:.3f}"
            assert call == verdict["call"]
