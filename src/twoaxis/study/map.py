"""The map of both axes as Markdown: every registered method by its coordinates, from fixed weights to attention."""

from __future__ import annotations

from collections.abc import Sequence

from twoaxis import spec
from twoaxis.types import Coordinates

# the order of the map; what is none of these comes last
WEIGHTS = ("fixed", "static", "gated", "QK, static Q", "QK")
AXES: tuple[spec.Axis, ...] = ("depth", "sequence")


def tables() -> str:
    """The map at a glance and the coordinates of either axis, as they stand in docs/methods/index.md."""
    parts = ["### At a glance", grid()]
    for axis in AXES:
        parts += [f"### The {axis} axis", coordinates(axis)]
    return "\n\n".join(parts) + "\n"


def grid() -> str:
    """Rows: what is read. Columns: where the weights are from. Cells: the methods there."""
    places: dict[str, dict[str, list[str]]] = {}
    for axis in AXES:
        for name, place in _sorted(axis):
            row = places.setdefault(f"{axis}: {place.source}", {})
            row.setdefault(place.weights, []).append(_link(name))
    kinds = sorted({kind for row in places.values() for kind in row}, key=_rank)
    rows = [[source, *(", ".join(row.get(kind, [])) for kind in kinds)] for source, row in places.items()]
    return _markdown(["reads", *kinds], rows)


def coordinates(axis: spec.Axis) -> str:
    """One row for each method of an axis, with its default options."""
    if axis == "depth":
        head = ["method", "reads", "weights", "normaliser", "shared", "put back", "reads per block"]
        head += ["starts as the standard Transformer", "ShortSWA over depth?"]
    else:
        head = ["method", "weights", "normaliser", "shared", "ShortSWA?"]
    rows = []
    for name, at in _sorted(axis):
        weights = [at.weights, at.normalizer, at.sharing]
        if axis == "depth":
            start = spec.method(axis, name).Config().standard_start()
            more = [at.injection, f"{at.reads_per_block:g}", start]
            rows.append([_link(name), at.source, *weights, *more, at.short_swa])
        else:
            rows.append([_link(name), *weights, at.short_swa])
    return _markdown(head, rows)


def _sorted(axis: spec.Axis) -> list[tuple[str, Coordinates]]:
    """From fixed weights to attention, and by name."""
    places = [(name, method.Config().coordinates()) for name, method in spec.methods(axis).items()]  # type: ignore[attr-defined]
    return sorted(places, key=lambda item: (_rank(item[1].weights), item[0]))


def _rank(weights: str) -> int:
    return WEIGHTS.index(weights) if weights in WEIGHTS else len(WEIGHTS)


def _link(name: str) -> str:
    return f"[{name}]({name}.md)"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
