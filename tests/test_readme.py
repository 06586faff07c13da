"""What the README says of the methods is what the registry says."""

import re
from pathlib import Path

import pytest

import twoaxis

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
ROWS = {cells[0]: cells[1:] for cells in re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|(.*)\|(.*)\|$", README, re.M)}
STARTS = {"exact": r"exactly|it is it", "up to eps": r"up to\b.*\beps", "no": r"no$|with "}


@pytest.mark.parametrize("name", twoaxis.methods("depth"))
def test_how_a_depth_method_starts(name: str) -> None:
    start = twoaxis.methods("depth")[name].Config().standard_start()
    assert re.match(STARTS[start], ROWS[name][2].strip()), f"{name} starts {start!r}, not {ROWS[name][2]!r}"


@pytest.mark.parametrize("axis", ["depth", "sequence"])
def test_every_method_is_listed_with_its_source(axis: str) -> None:
    for name, method in twoaxis.methods(axis).items():
        assert f"`{name}`" in README
        found = re.search(r"\d{4}\.\d{5}", method.source)
        assert found is None or found[0] in README, f"{name}: {method.source}"
