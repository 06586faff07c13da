"""docs/pitfalls.md names tests that exist, and says of every line either its tests or what it waits for."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in named}
    assert [f"{path}::{test}" for path, test in named if f"\ndef {test}(" not in texts[path]] == []
    assert len(named) > 100


def test_every_line_is_held_or_waits_for_a_room() -> None:
    for line in re.split(r"\n- ", PAGE)[1:]:
        answers = re.findall(r"\n  - (.*)", line)
        assert answers, line
        assert all(re.match(r"`tests/|later: needs \w", answer) for answer in answers), line
