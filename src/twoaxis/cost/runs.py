"""Own evidence: what a comparison folder's `results.json` says of each method against that study's baseline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from twoaxis.errors import InputError


def own_results(folder: Path | None) -> list[dict[str, Any]]:
    """One entry a row but the baseline: depth, local (sublayers beside attention and mlp), difference in bits per
    byte, call ("better", "worse", ..) and words. Empty without a folder; InputError if it holds no results."""
    if folder is None:
        return []
    path = folder / "results.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        base = next(r for r in data["rows"] if r["name"] == data["baseline"])
        calls = {v["row"]: v for v in data["verdicts"]}
        return [_entry(r, base, calls[r["name"]]) for r in data["rows"] if r is not base]
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise InputError(
            f"{path} holds no results of a comparison ({type(error).__name__}: {error}); "
            "give a folder that twoaxis compare or twoaxis report finished"
        ) from None


def _entry(row: dict[str, Any], base: dict[str, Any], verdict: dict[str, Any]) -> dict[str, Any]:
    scores = [row["valid_bits_per_byte"], base["valid_bits_per_byte"]]
    if not all(x is None or math.isfinite(x) for x in scores):
        raise ValueError(f"{row['name']} has {scores[0]} bits per byte and its baseline {scores[1]}")
    sequence = [s for s in row["sequence"] if isinstance(s, str)]
    return {
        "depth": row["depth"],
        "local": tuple(s for s in sequence if s.split("(")[0] not in ("attention", "mlp")),
        "difference": None if None in scores else scores[0] - scores[1],
        "call": verdict["call"],
        "words": f"{row['name']}: {verdict['words']}",
    }
