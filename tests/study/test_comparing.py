"""The main job on a tiny study: what it trains, skips, resumes, records and writes."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from twoaxis.depth import Connection, DepthConfig
from twoaxis.errors import InputError, RunError
from twoaxis.norm import RMSNorm
from twoaxis.study import Event, Row, Study, collect, compare, write_report
from twoaxis.types import Context, Coordinates, Cost, Layout, Reads, Shape

room = importlib.import_module("twoaxis.study.compare")  # the name itself is the function's


def listen(into: list[tuple[str, str, int]]) -> Any:
    return lambda event: event.kind == "step" or into.append((event.kind, event.row, event.seed))


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    data = json.loads(json.dumps(results))
    data["advice"] = re.sub(r"about .* of training here; ", "", data["advice"])
    for row in data["rows"]:
        row.pop("measured")
        for run in row["runs"]:
            run.pop("seconds"), run.pop("tokens_per_second")
    return data


def test_a_study_trains_measures_and_reports(study: Study) -> None:
    said: list[tuple[str, str, int]] = []
    results = compare(study, on_event=listen(said), command="twoaxis compare")
    kinds = [kind for kind, _ in itertools.groupby(kind for kind, _, _ in said)]
    assert kinds == ["start", "done", "start", "done", "measuring", "written"]
    assert (results["done"], results["failed"], results["unfinished"]) == (2, 0, 0)
    for row in results["rows"]:
        assert 0 < row["valid_bits_per_byte"] < 9
        assert row["measured"]["low"] <= row["measured"]["median"] <= row["measured"]["high"]
        assert row["measured"]["saved_bytes"] > 0
        assert row["measured"]["decode_state_bytes"] == 2 * 2 * 16 * 16 * 4
    assert [v["call"] for v in results["verdicts"]] == ["no ranking"]
    assert "--seeds 3" in results["advice"]
    out = Path(study.out)
    assert json.loads((out / "results.json").read_text()) == results
    for name in ("study.yaml", "report.html", "runs/additive/seed-0/metrics.jsonl"):
        assert (out / name).is_file()


def test_finished_runs_are_skipped_and_more_seeds_are_added(study: Study) -> None:
    first = compare(study)
    said: list[tuple[str, str, int]] = []
    again = compare(study, on_event=listen(said))
    assert said == [("skipped", "additive", 0), ("skipped", "denseformer", 0), ("written", "", 0)]
    assert again == first
    said.clear()
    more = compare(dataclasses.replace(study, seeds=(0, 1, 2)), on_event=listen(said))
    assert [s for s in said if s[0] == "skipped"] == [
        ("skipped", "additive", 0),
        ("skipped", "denseformer", 0),
    ]
    assert [s[1:] for s in said if s[0] == "done"] == [
        ("additive", 1),
        ("denseformer", 1),
        ("additive", 2),
        ("denseformer", 2),
    ]
    assert (more["done"], more["advice"]) == (6, "")
    assert more["rows"][0]["spread"] > 0
    assert more["rows"][0]["measured"] == first["rows"][0]["measured"]
    assert more["verdicts"][0]["seeds"] == [0, 1, 2]
    assert more["verdicts"][0]["p"] is not None


def test_rows_see_the_same_data_in_the_same_order(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    from twoaxis.train import session

    seen: list[Tensor] = []
    plain = session.accumulate

    def watch(model: Any, master: Any, batches: Any, *rest: Any) -> Any:
        seen.extend(batch.tokens for batch in batches)
        return plain(model, master, batches, *rest)

    monkeypatch.setattr(session, "accumulate", watch)
    monkeypatch.setattr(room, "_measure", lambda *args: None)
    compare(study)
    half = len(seen) // 2
    assert half == study.training.steps
    assert all(bool((a == b).all()) for a, b in zip(seen[:half], seen[half:], strict=True))
    assert not bool((seen[0] == seen[1]).all())


def test_order_of_rows_does_not_change_the_scores(study: Study, tmp_path: Path) -> None:
    # pitfalls: methods A,B,C then C,B,A -> ranking does not depend on order
    turned = dataclasses.replace(study, rows=study.rows[::-1])
    one, two = compare(study), compare(turned, tmp_path / "turned")
    scores = [{row["name"]: row["valid_bits_per_byte"] for row in r["rows"]} for r in (one, two)]
    assert scores[0] == scores[1]
    assert one["verdicts"][0]["difference"] == -two["verdicts"][0]["difference"]


def test_a_failing_run_is_recorded_and_stops_no_other(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = room.train

    def train(cfg: Any, out: Path, **options: Any) -> Any:
        if cfg.model.depth == "additive":
            raise RunError("the loss is nan at step 3")
        return plain(cfg, out, **options)

    monkeypatch.setattr(room, "train", train)
    said: list[tuple[str, str, int]] = []
    results = compare(study, on_event=listen(said))
    assert ("failed", "additive", 0) in said
    assert ("done", "denseformer", 0) in said
    assert (results["done"], results["failed"]) == (1, 1)
    assert results["rows"][0]["runs"][0]["error"] == "the loss is nan at step 3"
    assert results["verdicts"][0]["call"] == "no ranking"
    assert "the loss is nan at step 3" in (Path(study.out) / "report.html").read_text()
    monkeypatch.setattr(room, "train", plain)
    assert compare(study)["failed"] == 0  # tried again


def test_unexpected_errors_are_one_line(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*args: Any, **options: Any) -> Any:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(room, "train", train)
    results = compare(study)
    assert [row["runs"][0]["error"] for row in results["rows"]] == ["RuntimeError: two lines"] * 2
    assert "not measured" not in (Path(study.out) / "report.html").read_text().lower()


def test_an_interrupted_study_goes_on_exactly(study: Study, tmp_path: Path) -> None:
    whole = compare(study, tmp_path / "whole")

    def stop(event: Event) -> None:
        if event.kind == "step" and event.row == "denseformer" and event.data["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="step 2 of denseformer"):
        compare(study, on_event=stop)
    found = collect(study.out)
    assert (found["done"], found["unfinished"]) == (1, 1)
    steps: list[int] = []
    again = compare(study, on_event=lambda e: e.kind == "step" and steps.append(e.data["step"]))
    assert steps == [3, 4]
    assert without_times(again) == without_times(whole) | {"command": ""}


def test_a_signal_after_the_last_step_of_a_run_ends_the_study(
    study: Study, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(event: Event) -> None:
        if event.kind == "step" and event.data["step"] == 4:  # the last: nothing is left but writing
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="SIGTERM came after the last step"):
        compare(study, on_event=stop)
    found = collect(study.out)
    assert (found["done"], found["failed"], found["unfinished"]) == (1, 0, 1)
    assert not caplog.records  # a new run has nothing to go on with, and that is no news


@pytest.mark.parametrize(
    "change", [{"lr": 1e-5}, {"steps": 5}, {"seq_len": 8}], ids=lambda change: next(iter(change))
)
def test_other_settings_in_the_same_folder_are_refused(study: Study, change: dict[str, Any]) -> None:
    compare(study)
    before = (Path(study.out) / "results.json").read_bytes()
    other = dataclasses.replace(study, training=dataclasses.replace(study.training, **change))
    with pytest.raises(InputError, match=f"trained with {next(iter(change))}=.*another --out"):
        compare(other)
    assert (Path(study.out) / "results.json").read_bytes() == before


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints"])
def test_a_single_run_is_not_written_over(study: Study, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).touch()
    with pytest.raises(
        InputError, match="holds a single run, whose results would be lost; give another folder"
    ):
        compare(study, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == [name]


def test_report_is_rebuilt_from_the_run_folders(study: Study) -> None:
    results = compare(study, command="twoaxis compare")
    out = Path(study.out)
    page = (out / "report.html").read_bytes()
    for name in ("results.json", "report.html"):
        (out / name).unlink()
    assert collect(out) == results
    write_report(out)
    assert (out / "report.html").read_bytes() == page


def test_matched_budgets_are_trained_and_said(study: Study) -> None:
    rows = (Row(name="wide", sequence=("attention", "mlp(hidden=32)")), Row(name="usual"))
    training = dataclasses.replace(
        study.training, model=dataclasses.replace(study.training.model, vocab_size=256, d_model=32)
    )
    results = compare(dataclasses.replace(study, rows=rows, training=training, match="parameters"))
    wide, usual = results["rows"]
    assert wide["parameters"] == usual["parameters"]
    assert usual["sequence"] == ["attention", "mlp(hidden=32)"]
    assert usual["unmatched"] is None
    assert "parameters, within 1%" in results["matched"]


class Halved(Connection):
    """x' = x + y / 2: a method that no other file knows."""

    class Config(DepthConfig):
        """No options."""

        def coordinates(self) -> Coordinates:
            return Coordinates(source="branch", weights="fixed")

        def cost(self, shape: Shape, block: int = 0) -> Cost:
            return Cost(parameters=(shape.layout.n_sublayers + 1) * shape.layout.d_model)

    def __init__(self, cfg: Any, layout: Layout, block: int, index: int) -> None:
        super().__init__(cfg, layout, block, index)
        self.norm = RMSNorm(layout.d_model)

    def read(self, state: Tensor, ctx: Context) -> tuple[Reads, None]:
        return Reads(self.norm(state)), None

    def write(self, state: Tensor, carry: None, y: Tensor, ctx: Context) -> Tensor:
        return state + y / 2


def test_a_method_defined_here_is_compared(study: Study) -> None:
    twoaxis.register("depth", "halved")(Halved)
    try:
        results = compare(
            dataclasses.replace(study, rows=(Row(name="standard"), Row(name="new", depth="halved")))
        )
    finally:
        twoaxis.unregister("depth", "halved")
    standard, new = results["rows"]
    assert new["parameters"] == standard["parameters"]
    assert new["valid_bits_per_byte"] != standard["valid_bits_per_byte"]
    assert new["unmatched"] is None


def test_the_room_loads_nothing_heavy() -> None:
    code = "import sys, twoaxis.study; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [
        m for m in ("jinja2", "scipy", "matplotlib", "rich", "tyro", "transformers") if f"'{m}'" in loaded
    ]


def test_a_folder_that_is_no_comparison_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no study\.yaml"):
        collect(tmp_path)


def test_a_damaged_result_is_named(study: Study) -> None:
    compare(study)
    damaged = Path(study.out) / "runs" / "additive" / "seed-0" / "results.json"
    damaged.write_text("{")
    with pytest.raises(RunError, match=r"seed-0/results\.json cannot be read"):
        collect(study.out)


def test_threads_hold_while_comparing_and_no_longer(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr("twoaxis.study.environment.torch.set_num_threads", lambda n: seen.append(n))
    compare(dataclasses.replace(study, threads=3))
    assert seen == [3, before]
