"""A grid of which of several things wins where, as inline SVG: coloured by the page, numbered for those without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from twoaxis.study.chart import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from twoaxis.study.units import short


@dataclass(frozen=True)
class Regions:
    """Cells over x and y values. names: of the winners; cells: for each y, for each x, (winner, words on hover)."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str]
    cells: Sequence[Sequence[tuple[int, str]]]

    def svg(self) -> str:
        """The grid as one <svg> element with a legend of numbered winners below."""
        wide, high = (WIDTH - LEFT - RIGHT) / len(self.x), (HEIGHT - TOP - BOTTOM) / len(self.y)
        parts = [_text(f"{self.title} by {self.y_label}", 4, 12, "start", "label")]
        for row, (y, cells) in enumerate(zip(self.y, self.cells, strict=True)):
            top = HEIGHT - BOTTOM - (row + 1) * high
            parts.append(_text(short(y), LEFT - 6, top + high / 2 + 4, "end"))
            for column, (winner, words) in enumerate(cells):
                left = LEFT + column * wide
                box = f'x="{left:.1f}" y="{top:.1f}" width="{wide - 2:.1f}" height="{high - 2:.1f}"'
                fill = f'style="fill:var(--c{(winner + 1) % COLOURS})" fill-opacity=".35"'
                parts.append(f"<rect {box} {fill}><title>{escape(words)}</title></rect>")
                parts.append(
                    _text(str(winner + 1), left + wide / 2 - 1, top + high / 2 + 4, "middle", "label")
                )
        for column, x in enumerate(self.x):
            parts.append(_text(short(x), LEFT + (column + 0.5) * wide, HEIGHT - BOTTOM + 16, "middle"))
        parts.append(_text(self.x_label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, "middle", "label"))
        for i, name in enumerate(self.names):
            parts.append(_text(f"{i + 1}  {name}", LEFT, HEIGHT + 16 * (i + 1), "start"))
        label = escape(f"{self.title} by {self.x_label} and {self.y_label}", quote=True)
        box = f"0 0 {WIDTH} {HEIGHT + 16 * len(self.names) + 8}"
        return f'<svg viewBox="{box}" role="img" aria-label="{label}"><title>{label}</title>{"".join(parts)}</svg>'


def _text(text: str, x: float, y: float, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
