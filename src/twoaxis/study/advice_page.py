"""The adviser's page: its decision, its table, and how prices change with depth, window, stages and context."""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from pathlib import Path

from twoaxis.cost.advice import Advice, Request
from twoaxis.cost.advise import plain
from twoaxis.cost.load import Load
from twoaxis.cost.roofline import predict
from twoaxis.cost.rows import Point
from twoaxis.cost.sizes import with_methods
from twoaxis.model import write_atomically
from twoaxis.study import units
from twoaxis.study.chart import Chart, Series, swatch
from twoaxis.study.regions import Regions
from twoaxis.study.report import STYLE

TEMPLATE = "advice.html.j2"
DEPTHS = (4, 8, 16, 32, 48)
STAGES = (1, 2, 4, 8, 16)
CONTEXTS = (1024, 4096, 16384, 65536)
SHOWN = ("ddl", "hyper_connections", "attnres", "attnres(block_sublayers=6)", "depth_window(window_blocks=4)")


def write_page(path: Path, advice: Advice) -> None:
    """Write the page of an advice, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render(advice).encode())


def render(advice: Advice) -> str:
    """The page as text."""
    import jinja2
    from markupsafe import Markup

    pages = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters |= {"si": units.si, "percent": units.percent}
    room = files("twoaxis.study")
    template = pages.from_string(room.joinpath(TEMPLATE).read_text(encoding="utf-8"))
    request = advice.request
    lines = _points(request)
    return template.render(
        style=Markup(room.joinpath(STYLE).read_text(encoding="utf-8")),
        a=plain(advice),
        evidence=[[r.words() for r in row.evidence] for row in advice.rows],
        title=request.machine.title or request.machine.name,
        charts=[Markup(chart.svg()) for chart in charts(request) if chart.svg()],
        regions=Markup(regions(request).svg()),
        legend=[(Markup(swatch(i)), point.name) for i, point in enumerate(lines)],
    )


def charts(request: Request) -> list[Chart]:
    """Overhead of a step over the standard model's against blocks, windows and pipeline stages."""
    lines, load = _points(request), request.load
    depths = [
        _series(i, p, [(n, _overhead(request, p, load, blocks=n)) for n in DEPTHS])
        for i, p in enumerate(lines)
    ]
    blocks = request.model.n_blocks
    stages = [n for n in STAGES if blocks % n == 0 and _can_send(request, n)]
    piped = [
        _series(i, p, [(n, _overhead(request, p, load, stages=n)) for n in stages])
        for i, p in enumerate(lines)
    ]
    made = [_chart("Depth", "blocks", depths), *_windows(request)]
    return [*made, _chart("Pipeline", "stages", piped)] if len(stages) > 1 else made


def regions(request: Request) -> Regions:
    """Which placement costs least at each context length and depth: a local window, a depth window, a full read."""
    swa = Point("additive", (f"short_swa(window={request.window})",))
    points = [swa, Point("depth_window(window_blocks=4)"), Point("attnres")]
    contexts = [t for t in CONTEXTS if t >= request.window]
    cells = []
    for n in DEPTHS:
        row = []
        for t in contexts:
            load = dataclasses.replace(request.load, seq_len=t)
            prices = [_overhead(request, p, load, blocks=n) for p in points]
            least = min(range(len(points)), key=prices.__getitem__)
            row.append((least, ", ".join(f"{p.name} {x:+.1%}" for p, x in zip(points, prices, strict=True))))
        cells.append(row)
    return Regions(
        "Cheapest placement", "tokens of context", "blocks", contexts, DEPTHS, [p.name for p in points], cells
    )


def _points(request: Request) -> list[Point]:
    return [*(Point(name) for name in SHOWN), Point("additive", (f"short_swa(window={request.window})",))]


def _overhead(
    request: Request, point: Point, load: Load, blocks: int | None = None, stages: int = 1
) -> float:
    """Of a step over the standard model's, on a pipeline alone."""
    mesh = dataclasses.replace(request.mesh, dp=1, tp=1, cp=1, pp=stages)
    model = dataclasses.replace(request.model, n_blocks=blocks or request.model.n_blocks)
    own, base = (
        predict(with_methods(model, p.depth, *p.before), request.machine, load, mesh).seconds
        for p in (point, Point())
    )
    return own / base - 1


def _can_send(request: Request, stages: int) -> bool:
    return stages == 1 or request.machine.send_rate(stages) is not None


def _windows(request: Request) -> list[Chart]:
    """One chart for each axis: the window of ShortSWA in tokens, that of a depth read in blocks."""
    load, blocks = request.load, request.model.n_blocks
    tokens = [w for w in (16, 64, 256, 1024) if w <= load.seq_len]
    states = [k for k in (1, 2, 4, 8, 16) if k <= blocks]
    local = [(w, _overhead(request, Point("additive", (f"short_swa(window={w})",)), load)) for w in tokens]
    depth = [(k, _overhead(request, Point(f"depth_window(window_blocks={k})"), load)) for k in states]
    return [
        _chart("Window along the sequence", "tokens", [_series(5, Point("additive", ("short_swa",)), local)]),
        _chart("Window along depth", "blocks", [_series(4, Point("depth_window"), depth)]),
    ]


def _series(index: int, point: Point, found: list[tuple[int, float]]) -> Series:
    return Series(point.name, index, [float(x) for x, _ in found], [100 * y for _, y in found])


def _chart(title: str, x_label: str, series: list[Series]) -> Chart:
    return Chart(title=title, x_label=x_label, y_label=f"{title}: step overhead, %", series=series, dots=True)
