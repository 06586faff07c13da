"""The table of `benchmarks/overhead.py`: what it has is not measured again, what it lacks shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import overhead


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, timed, sized = tmp_path / "overhead.json", [], []

    def time_group(path: Path, rows: Any, blocks: int, methods: list[str], rounds: int) -> None:
        timed.append(methods)
        for method in methods:
            rows[f"{blocks} {method}"] = {"time": [1.2, 1.1, 1.3], "A/A": [1.01, 1, 1.02], "rounds": rounds}
        overhead.write(path, rows)

    def memory_of(blocks: int, method: str) -> dict[str, int]:
        sized.append(method)
        if len(sized) == 3:
            raise KeyboardInterrupt
        return {"saved_bytes": 100 + len(method), "peak_growth_bytes": 200}

    monkeypatch.setattr(overhead, "time_group", time_group)
    monkeypatch.setattr(overhead, "memory_of", memory_of)
    with pytest.raises(KeyboardInterrupt):
        overhead.measure(file, 6, ["ddl", "attnres", "lime"], 5, group=2)
    assert sized == ["additive", "ddl", "attnres"]
    overhead.measure(file, 6, ["ddl", "attnres", "lime"], 5, group=2)
    assert timed == [["ddl", "attnres"], ["lime"]]
    assert sized == ["additive", "ddl", "attnres", "attnres", "lime"]  # each written row once
    rows = json.loads(file.read_text())["rows"]
    assert rows["6 ddl"]["memory"] == {"saved_bytes": round(103 / 108, 3), "peak_growth_bytes": 1}
    rows["12 ddl"] = {}
    *_, lime, empty, again = overhead.table(rows).splitlines()
    assert lime == "| `lime` | **1.20** (1.10 to 1.30); 0.96, 1.00 | -; -, - |"
    assert (empty, again) == ("", "A/A by depth: 6: 1.01 to 1.01")
