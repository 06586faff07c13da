"""The report's page: self-contained, well-formed, and saying what the data say."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.study import Study, compare
from twoaxis.study.chart import Chart, Series
from twoaxis.study.curves import charts
from twoaxis.study.report import headline, render
from twoaxis.study.units import duration, mebibytes, percent, short, si, ticks
from twoaxis.study.yardsticks import yardsticks

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Refuses unbalanced tags; collects the text and every attribute."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def made(study: Study) -> tuple[Path, dict[str, Any]]:
    return Path(study.out), compare(study, command="twoaxis compare study.yaml")


def test_page_asks_nothing_of_the_network(made: tuple[Path, dict[str, Any]]) -> None:
    text = (made[0] / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "xlink:href", "data"}
    assert not re.search(r"https?:|url\(|@import", text)


def test_page_shows_every_fact_of_every_row(made: tuple[Path, dict[str, Any]]) -> None:
    folder, results = made
    page = Page(render(folder, results))
    for row in results["rows"]:
        for fact in (
            f"{row['valid_bits_per_byte']:.3f}",
            f"{row['parameters']:,}",
            f"{row['flops_per_token']:,.0f}",
            f"{row['tokens']:,}",
            str(row["lr"]),
            si(row["measured"]["median"]),
            mebibytes(row["measured"]["saved_bytes"]),
            mebibytes(row["measured"]["decode_state_bytes"]),
        ):
            assert fact in page.text
    for words in (
        "Nothing is ranked yet.",
        "--seeds 3",
        results["verdicts"][0]["words"],
        results["environment"]["torch"],
        "twoaxis compare study.yaml",
        f"xz -9e {results['yardsticks']['xz -9e']:.3f}",
    ):
        assert words in page.text
    assert page.attributes.count(("role", "img")) == 6  # two rows of charts
    assert page.attributes.count(("class", "swatch")) == 2


def test_page_offers_controls_and_shows_failures(made: tuple[Path, dict[str, Any]]) -> None:
    folder, results = copy.deepcopy(made)
    row = results["rows"][1]
    row["controls"] = ['--depth "additive" --sequence "attention,mlp(hidden=72)" has its parameters']
    row["runs"] = [{"seed": 0, "status": "failed", "error": "the loss is <nan> & gone", "seconds": None}]
    row["valid_bits_per_byte"] = None
    text = render(folder, results)
    page = Page(text)
    assert "--match parameters" in page.text
    assert "mlp(hidden=72)" in page.text
    assert "the loss is <nan> & gone" in page.text
    assert "<nan>" not in text  # escaped


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([], "nothing to compare"),
        (["no ranking", "no ranking"], "Nothing is ranked yet."),
        (
            ["better", "no ranking", "better", "inside the noise"],
            "2 better, 1 inside the noise, 1 no ranking",
        ),
    ],
)
def test_headline(calls: list[str], words: str) -> None:
    assert words in headline({"baseline": "a", "verdicts": [{"call": c} for c in calls]})


def test_curves_are_means_over_seeds_with_their_range(study: Study) -> None:
    results = compare(dataclasses.replace(study, seeds=(0, 1)))
    valid, training = charts(Path(study.out), results)
    assert [chart.x_label.split()[0] for chart in valid] == ["tokens", "FLOPs", "seconds"]
    line = valid[0].series[0]
    files = [Path(study.out) / f"runs/additive/seed-{seed}/metrics.jsonl" for seed in (0, 1)]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    at = [[r["val_bits_per_byte"] for r in run if "val_bits_per_byte" in r] for run in rows]
    assert list(line.x) == [2 * 32.0, 4 * 32.0]  # tokens after steps 2 and 4
    assert list(line.y) == pytest.approx([(a + b) / 2 for a, b in zip(*at, strict=True)])
    assert list(line.low) == [min(pair) for pair in zip(*at, strict=True)]
    assert list(line.high) == [max(pair) for pair in zip(*at, strict=True)]
    assert list(training[2].series[1].x) == sorted(training[2].series[1].x)
    assert "polygon" in valid[0].svg()


def chart(x: list[float], y: list[float], **options: Any) -> Chart:
    return Chart(title="T", x_label="x", y_label="y", series=[Series("a<b", 9, x, y)], **options)


finite = st.floats(-1e9, 1e9)


@given(st.lists(st.tuples(st.floats(0, 1e18), finite), min_size=1, max_size=5), st.booleans())
def test_charts_are_well_formed_and_inside_their_frame(points: list[tuple[float, float]], dots: bool) -> None:
    x, y = ([p[i] for p in points] for i in (0, 1))
    svg = ElementTree.fromstring(chart(x, y, dots=dots, guides=[("here", y[0])]).svg())
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    line = svg.find("svg/polyline")
    assert line is not None
    for pair in line.attrib["points"].split():
        px, py = map(float, pair.split(","))
        assert 0 <= px <= width
        assert 0 <= py <= height


def test_a_chart_without_points_is_nothing() -> None:
    assert chart([], []).svg() == ""


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_even_and_inside(low: float, width: float) -> None:
    marks = ticks(low, low + width)
    assert 2 <= len(marks) <= 7
    assert all(low - 1e-6 * width <= mark <= low + width * (1 + 1e-6) for mark in marks)
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3)
    assert f"{gaps[0]:.0e}"[0] in "125"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (si(0), "0"),
        (si(7), "7.00"),
        (si(999), "999"),
        (si(999.9), "1.00k"),
        (si(1_310_720), "1.31M"),
        (si(-2500), "-2.50k"),
        (si(3.2e13), "32.0T"),
        (short(2000), "2k"),
        (short(0), "0"),
        (short(300), "300"),
        (short(1.25e9), "1.25G"),
        (mebibytes(0), "0 B"),
        (mebibytes(1023), "1023 B"),
        (mebibytes(1536), "1.50 KiB"),
        (mebibytes(300 * 2**20), "300 MiB"),
        (duration(42.4), "42 s"),
        (duration(150), "2.5 min"),
        (duration(9000), "2.5 h"),
        (percent(0.1234), "+12.3%"),
        (percent(-0.5), "-50.0%"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_yardsticks_are_the_corpus_readmes() -> None:
    found = yardsticks("shakespeare", 0.05)
    assert found["bytes"] == 103_371
    assert [round(found[name], 3) for name in ("byte entropy", "gzip -9", "xz -9e")] == [4.845, 3.289, 3.029]
    assert yardsticks("no such text", 0.05) == {}
