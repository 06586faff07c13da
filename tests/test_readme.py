"""What the README says of the methods is what the registry says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_the_code_of_the_guide_to_operators_runs() -> None:
    guide = (Path(__file__).parents[1] / "docs/guides/operators.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # this file's own text
    x, q, h = names["x"], names["q"], names["h"]
    assert torch.allclose(h, torch.stack(x).sum(0), atol=1e-5)
    assert names["y"].shape == (*h.shape, 4)
    assert names["X"].shape == (*h.shape[:2], 4, 64)
    exact = twoaxis.ops.reference.local_attention(q, q, q, 32)
    assert torch.allclose(names["o"], exact, atol=1e-5)
    newest = twoaxis.ops.depthwise_causal_conv(x[0], torch.eye(4)[-1].expand(64, 4))
    assert torch.equal(newest, x[0])  # the last tap is the present token's
