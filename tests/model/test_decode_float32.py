"""Steps in float32, where kernels for a few tokens run: chunks, a rollback and steps equal one full forward."""

from __future__ import annotations

import pytest
import torch

from configurations import VOCAB, Case, depths
from twoaxis import methods

DEFAULTS = set(methods("depth"))
EVERY = [d if d in DEFAULTS else pytest.param(d, marks=pytest.mark.full) for d in depths()]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("depth", EVERY)
def test_steps_equal_one_forward(
    depth: str, backend: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    model = Case(depth).model(torch.float32).eval()
    tokens = torch.randint(VOCAB, (rows, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache, found = model.new_cache(rows, max_rollback=3), []
        for start, end, back in ((0, 4, 0), (4, 5, 0), (5, 6, 0), (6, 7, 2), (5, 7, 0), (7, 8, 0), (8, 9, 0)):
            found.append(model(tokens[:, start:end], cache=cache)[:, : end - start - back])
            cache.drop_last(back)
        whole = model(tokens)
    steps = torch.cat([found[0], found[1], *found[4:]], 1)
    assert steps.shape == whole.shape
    error = (steps - whole).abs().max() / whole.abs().max()
    assert error < 1e-4  # float64 feeding holds the algorithms to 1e-10; here it is rounding
