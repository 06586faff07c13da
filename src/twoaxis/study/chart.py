"""Line charts as inline SVG: coloured by the page's style sheet, readable without colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from twoaxis.study.units import short, ticks

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 24, 38  # room for labels
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "12 4", "1 2", "4 1 1 1")
COLOURS = len(DASHES)
Range = tuple[float, float]
Place = Callable[[float], float]  # from a value to a coordinate


@dataclass(frozen=True)
class Series:
    """One line: points (x, y), and a band low .. high around it if there is one."""

    label: str
    index: int  # which colour and dash of the page
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Several lines.

    guides: labelled horizontal lines. y_max: cut off what is above it. dots: mark each point, its value shown
    on hover. x_text: how a value on the x axis is written.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    guides: Sequence[tuple[str, float]] = ()
    y_max: float | None = None
    dots: bool = False
    x_text: Callable[[float], str] = field(default=short)

    def svg(self) -> str:
        """The chart as one <svg> element; an empty text when there is nothing to draw."""
        lines = [s for s in self.series if len(s.x)]
        if not lines:
            return ""
        (x0, x1), (y0, y1) = self._ranges(lines)

        def px(x: float) -> float:
            return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

        def py(y: float) -> float:
            return TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

        frame = (
            f'y="{TOP}" height="{HEIGHT - TOP - BOTTOM}" viewBox="0 {TOP} {WIDTH} {HEIGHT - TOP - BOTTOM}"'
        )
        parts = [*self._axes((x0, x1), (y0, y1), px, py), *self._guides((y0, y1), py)]
        parts.append(f'<svg width="{WIDTH}" {frame}>')  # clips what is above y_max
        for s in lines:
            parts += self._line(s, px, py)
        parts.append("</svg>")
        label = escape(f"{self.title}: {self.y_label} against {self.x_label}", quote=True)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
            f"<title>{label}</title>{''.join(parts)}</svg>"
        )

    def _ranges(self, lines: Sequence[Series]) -> tuple[Range, Range]:
        xs = [x for s in lines for x in s.x]
        ys = [y for s in lines for part in (s.y, s.low, s.high) for y in part]
        top = max(ys) if self.y_max is None else min(self.y_max, max(ys))
        bottom = min(ys)
        room = max(0.06 * (top - bottom), 1e-3 * abs(top), 1e-6)
        right = max(xs)
        return (0.0, right if right > 0 else 1.0), (bottom - room, top + room)

    def _axes(self, x_range: Range, y_range: Range, px: Place, py: Place) -> list[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        marks = ticks(*y_range, about=7)
        digits = max(1, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9)) if len(marks) > 1 else 3
        parts = [_text(self.y_label, 4, 12, "start", "label")]
        for y in marks:
            parts.append(_rule("grid", LEFT, right, py(y), py(y)))
            parts.append(_text(f"{y:.{digits}f}", LEFT - 6, py(y) + 4, "end"))
        for x in ticks(*x_range, about=4):
            parts.append(_rule("axis", px(x), px(x), bottom, bottom + 4))
            parts.append(_text(self.x_text(x), px(x), bottom + 16, "middle"))
        parts.append(_rule("axis", LEFT, right, bottom, bottom))
        parts.append(_text(self.x_label, (LEFT + right) / 2, HEIGHT - 5, "middle", "label"))
        return parts

    def _guides(self, y_range: Range, py: Place) -> list[str]:
        parts = []
        for label, y in self.guides:
            if y_range[0] <= y <= y_range[1]:
                parts.append(_rule("guide", LEFT, WIDTH - RIGHT, py(y), py(y)))
                parts.append(_text(label, WIDTH - RIGHT, py(y) - 4, "end", "guide"))
        return parts

    def _line(self, s: Series, px: Place, py: Place) -> list[str]:
        colour = f"var(--c{s.index % COLOURS})"
        dash = DASHES[s.index % COLOURS]
        parts = []
        if len(s.low) > 1:
            edge = [*zip(s.x, s.high, strict=True), *reversed(list(zip(s.x, s.low, strict=True)))]
            points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in edge)
            parts.append(f'<polygon class="band" points="{points}" style="fill:{colour}"/>')
        points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.y, strict=True))
        parts.append(f'<polyline points="{points}" style="stroke:{colour}" stroke-dasharray="{dash}"/>')
        if self.dots:
            for x, y in zip(s.x, s.y, strict=True):
                text = escape(f"{s.label}: {y:.3f} at {self.x_text(x)}")
                parts.append(
                    f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6" style="fill:{colour}">'
                    f"<title>{text}</title></circle>"
                )
        return parts


def swatch(index: int) -> str:
    """A short piece of a series' line, for the legend."""
    return (
        f'<svg class="swatch" viewBox="0 0 30 8" aria-hidden="true"><polyline points="0,4 30,4" '
        f'style="stroke:var(--c{index % COLOURS})" stroke-dasharray="{DASHES[index % COLOURS]}"/></svg>'
    )


def _rule(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(text: str, x: float, y: float, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
