"""The figures of "who reads whom" on the methods' pages: one self-contained SVG for each method."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from twoaxis import spec
from twoaxis.study.links import ABSENT, FROM_THE_START, NEVER, ONCE_TRAINED, Links
from twoaxis.study.reads import depth_links
from twoaxis.study.token_reads import token_links

CELL, GAP, LEFT, TOP, CHARACTER = 18, 6, 84, 34, 6.5  # pixels; GAP after a block
WORDS = {
    FROM_THE_START: "read from the start",
    ONCE_TRAINED: "read once trained: its weight starts at zero",
    NEVER: "there, and not read",
}
DEPTH = (
    "Rows: what a sublayer reads, what a block writes, the end.",
    "Columns: tensors of the state before the row's block; a number",
    "is an earlier source, 0 the first. Cores are held fixed.",
)
SEQUENCE = ("Rows: a token's output. Columns: the tokens of the input.",)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #24292f }
.full { fill: #0550ae } .later { fill: none; stroke: #0550ae; stroke-width: 2 } .no { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d7e0 } .full { fill: #58a6ff } .later { stroke: #58a6ff } .no { fill: #768390 }
}
"""


def figure(axis: spec.Axis, name: str) -> str:
    """The figure of a registered method with its default options, as SVG."""
    return drawn([depth_links(name)], DEPTH) if axis == "depth" else drawn(token_links(name), SEQUENCE)


def figures() -> dict[str, str]:
    """File name -> SVG, for every registered method of both axes."""
    axes: tuple[spec.Axis, ...] = ("depth", "sequence")
    return {f"{name}.svg": figure(axis, name) for axis in axes for name in spec.methods(axis)}


def drawn(panels: Sequence[Links], caption: Sequence[str] = ()) -> str:
    """Panels of links side by side, then what the marks mean."""
    parts, x, y = [], 0.0, 0.0
    for links in panels:
        inner, reach, height = _panel(links)
        parts += [f'<g transform="translate({x:.0f})">', *inner, "</g>"]
        x, y = x + reach, max(y, height)
    width = max(x, 400.0)
    used = {mark for links in panels for row in links.marks for mark in row}
    for mark, words in WORDS.items():
        if mark in used:
            parts += [_mark(mark, 12, y), _text(words, 36, y + CELL / 2 + 4)]
            y += CELL
    for line in caption:
        parts.append(_text(line, 6, y + CELL / 2 + 4))
        y += CELL - 3
    label = escape("Who reads whom: " + ", ".join(links.title for links in panels), quote=True)
    told = escape("\n".join(f"{row}: {said}" for links in panels for row, said in _said(links)))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y + 6:.0f}" width="{width:.0f}" '
        f'role="img" aria-label="{label}">\n<title>{label}</title>\n<desc>{told}</desc>\n<style>{STYLE}</style>\n'
        f"{body}\n</svg>\n"
    )


def _panel(links: Links) -> tuple[list[str], float, float]:
    """The parts of one panel, its width and its height."""
    names = [column.rsplit("source.", 1)[-1] for column in links.columns]
    widths = [max(CELL, CHARACTER * len(name) + 6) for name in names]
    edges = [LEFT + sum(widths[:i]) for i in range(len(widths))]
    centres = [edge + width / 2 for edge, width in zip(edges, widths, strict=True)]
    parts = [_text(links.title, 6, 13)]
    parts += [_text(name, x, TOP - 4, "middle") for name, x in zip(names, centres, strict=True)]
    top: float = TOP
    for row, marks in zip(links.rows, links.marks, strict=True):
        parts.append(_text(row, LEFT - 8, top + CELL / 2 + 4, "end"))
        parts += [_mark(m, x - CELL / 2, top) for m, x in zip(marks, centres, strict=True) if m != ABSENT]
        top += CELL + (GAP if row.startswith("write") else 0)
    return parts, LEFT + sum(widths) + 8, top + GAP


def _mark(mark: str, x: float, y: float) -> str:
    """A mark in the cell whose upper left corner is at (x, y)."""
    if mark == FROM_THE_START:
        return f'<rect class="full" x="{x + 3:.1f}" y="{y + 3:.1f}" width="12" height="12" rx="2"/>'
    if mark == ONCE_TRAINED:
        return f'<rect class="later" x="{x + 4:.1f}" y="{y + 4:.1f}" width="10" height="10" rx="2"/>'
    return f'<circle class="no" cx="{x + 9:.1f}" cy="{y + 9:.1f}" r="1.5"/>'


def _text(text: str, x: float, y: float, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _said(links: Links) -> list[tuple[str, str]]:
    """Each row in words, for those who cannot see the picture."""
    rows = []
    for row, marks in zip(links.rows, links.marks, strict=True):
        now = [c for c, m in zip(links.columns, marks, strict=True) if m == FROM_THE_START]
        later = [c for c, m in zip(links.columns, marks, strict=True) if m == ONCE_TRAINED]
        said = "reads " + (", ".join(now) or "nothing at the start")
        rows.append((row, said + (f"; once trained also {', '.join(later)}" if later else "")))
    return rows
