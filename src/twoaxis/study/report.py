"""report.html: the whole comparison in one file that asks nothing of the network."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from twoaxis.model import write_atomically
from twoaxis.study import units
from twoaxis.study.chart import swatch
from twoaxis.study.collect import collect
from twoaxis.study.curves import charts

TEMPLATE = "report.html.j2"
STYLE = "page.css"


def write_report(folder: str | Path, results: dict[str, Any] | None = None) -> Path:
    """Write a comparison folder's `report.html` and return its path; collects the results if not given."""
    folder = Path(folder)
    page = render(folder, collect(folder) if results is None else results)
    write_atomically(folder / "report.html", page.encode())
    return folder / "report.html"


def render(folder: Path, results: dict[str, Any]) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    pages = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters |= {
        "si": units.si,
        "bytes": units.mebibytes,
        "duration": units.duration,
        "percent": units.percent,
    }
    template = pages.from_string(files("twoaxis.study").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    valid, training = charts(folder, results)
    return template.render(
        style=Markup(files("twoaxis.study").joinpath(STYLE).read_text(encoding="utf-8")),
        r=results,
        base=results["rows"][0],
        valid=[Markup(chart.svg()) for chart in valid],
        training=[Markup(chart.svg()) for chart in training],
        swatches=[Markup(swatch(i)) for i in range(len(results["rows"]))],
        headline=headline(results),
        data=Path(results["study"]["train"]["data"]).name,
        partial=results["study"]["train"]["eval_tokens"],
    )


def headline(results: dict[str, Any]) -> str:
    """The outcome in one sentence."""
    calls = [v["call"] for v in results["verdicts"]]
    counts = {c: calls.count(c) for c in ("better", "worse", "inside the noise", "no ranking")}
    if not calls:
        return "One row alone: there is nothing to compare."
    if counts["no ranking"] == len(calls):
        return "Nothing is ranked yet."
    said = [f"{n} {c}" for c, n in counts.items() if n]
    return f"Against {results['baseline']}: {', '.join(said)}."
