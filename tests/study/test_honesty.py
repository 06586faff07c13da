"""What a comparison refuses to say: other text, failed runs, scores that are no numbers, places."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from twoaxis.errors import InputError, RunError
from twoaxis.study import Row, Study, collect, compare


def scored(study: Study, changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Write finished runs on four seeds, the second row far better; a run's results may be changed."""
    for row, seed in study.runs():
        run = Path(study.out) / "runs" / row.slug / f"seed-{seed}"
        run.mkdir(parents=True)
        score = 3.0 - 0.5 * (row is not study.baseline) + 0.01 * seed
        found = {"status": "done", "valid_bits_per_byte": score, "data": {"train": "a", "valid": "b"}}
        (run / "results.json").write_text(json.dumps(found | changes.get(f"{row.name} {seed}", {})))
    text = yaml.safe_dump({key: value for key, value in study.to_dict().items() if key != "out"})
    (Path(study.out) / "study.yaml").write_text(text)
    return collect(study.out)


@pytest.mark.parametrize(
    ("changes", "call", "words"),
    [
        pytest.param({}, "better", "better than additive", id="nothing-wrong"),
        pytest.param(
            {"other 2": {"data": {"train": "c", "valid": "b"}}}, "no ranking", "the data changed", id="text"
        ),
        pytest.param(
            {"additive 1": {"data": {"train": "a", "valid": "c"}}},
            "no ranking",
            "the data changed",
            id="held-out",
        ),
        pytest.param(
            {"other 3": {"status": "failed", "error": "the loss is nan"}},
            "no ranking",
            "other failed on seed 3",
            id="failed-run-of-the-row",
        ),
        pytest.param(
            {"additive 0": {"status": "failed", "error": "the loss is nan"}},
            "no ranking",
            "additive failed on seed 0",
            id="failed-run-of-the-baseline",
        ),
    ],
)
def test_rows_are_ranked_only_on_the_same_text_and_without_failed_runs(
    study: Study, changes: dict[str, dict[str, Any]], call: str, words: str
) -> None:
    # pitfalls: a ranking needs the same data for every row
    same = (Row(name="additive"), Row(name="other", sequence=("attention", "mlp")))
    found = scored(dataclasses.replace(study, rows=same, seeds=(0, 1, 2, 3)), changes)
    (verdict,) = found["verdicts"]
    assert verdict["call"] == call
    assert words in verdict["words"]


def test_runs_of_a_changed_text_are_told_apart(study: Study) -> None:
    text = Path(study.training.data)
    first = dataclasses.replace(study, rows=study.rows[:1])
    compare(first)
    text.write_text(text.read_text().replace("and", "und"))
    changed = compare(study)["rows"][1]
    assert "the data changed between runs" in changed["unmatched"]


@pytest.mark.parametrize("score", ['"low"', "NaN", "[]"])
def test_a_score_that_is_no_number_is_named(study: Study, score: str) -> None:
    run = {"status": "done", "valid_bits_per_byte": 0}
    with pytest.raises(RunError, match=r"results\.json is damaged"):
        scored(study, {"additive 0": run | {"valid_bits_per_byte": json.loads(score)}})


def test_results_name_no_folder_of_this_machine(study: Study) -> None:
    results = compare(study)
    assert results["study"]["train"]["data"] == "text.txt"
    assert str(Path(study.training.data).parent) not in json.dumps(results)


@pytest.mark.parametrize("place", ["text.txt", "text.txt/inside"], ids=["a-file", "in-a-file"])
def test_an_output_that_cannot_be_a_folder_is_bad_input(study: Study, tmp_path: Path, place: str) -> None:
    with pytest.raises(InputError, match=r"cannot write in .*give another folder"):
        compare(study, tmp_path / place)
