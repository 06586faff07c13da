"""Windows over the newest sources: wide ones change nothing, narrow ones are the full method with zero weights."""

from __future__ import annotations

import pytest
import torch

import twoaxis
from configurations import Case, tokens
from twoaxis.depth import build, named_tensors

WINDOWED = {
    "attnres": "window_sources",
    "delta_attnres": "window_sources",
    "denseformer": "window_blocks",
    "elc_bert": "window_blocks",
    "muddformer": "window_blocks",
    "vertical_attention": "window_blocks",
}


@pytest.mark.parametrize("method", WINDOWED)
def test_a_window_over_everything_is_the_method_without_one(method: str) -> None:
    for depth in (f"{method}({WINDOWED[method]}=9)", method):
        out = Case(depth).model()(tokens())
        if "(" in depth:
            wide = out
    assert torch.equal(wide, out)


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("denseformer", "alpha"),
        ("elc_bert(variant='weighted_output', normalize='none')", "mix.logits"),
        ("muddformer(ways=1, dynamic=False)", "mix.static"),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [1, 2])
def test_a_window_is_the_full_method_with_zero_weights(method: str, weights: str, window: int) -> None:
    options = method.removesuffix(")") + ("(" if "(" not in method else ", ")
    narrow, full = (Case(d).model(n_blocks=4) for d in (f"{options}window_blocks={window})", method))
    given, state = narrow.state_dict(), full.state_dict()
    for name, wide in state.items():
        if name.endswith(weights):
            seen = torch.zeros_like(wide)
            if name in given:
                kept = given[name].shape[-1]
                sink = "muddformer" in method and kept < wide.shape[-1]  # its first column is the embeddings
                seen[..., wide.shape[-1] - kept + sink :] = given[name][..., sink:]
                seen[..., :1] += given[name][..., :1] * sink
            wide.copy_(seen)
        else:
            wide.copy_(given[name])
    torch.testing.assert_close(narrow(tokens()), full(tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        ("elc_bert(window_blocks=2)", [1, 2, 2, 2, 1]),
        ("elc_bert(window_blocks=2, variant='weighted_output')", [1, 2, 2, 2, 2]),
        ("vertical_attention(window_blocks=2)", [1, 2, 2, 2, 0]),
        ("denseformer(window_blocks=3)", [1, 2, 2, 2, 0]),
        ("denseformer(window_blocks=3, dilation=2)", [1, 2, 2, 1, 0]),
        ("muddformer(window_blocks=2)", [1, 2, 3, 3, 3]),
        ("delta_attnres(window_sources=3)", [1, 3, 3, 3, 0]),
    ],
)
def test_only_what_the_window_sees_is_held(spec: str, held: list[int]) -> None:
    stream, blocks = build(spec, 6, [["attention", "mlp"]] * 4)
    state, ctx, found = stream.open(torch.randn(1, 2, 6), twoaxis.Context()), twoaxis.Context(), []
    for depth in range(5):
        names = named_tensors(state)
        assert names.keys() == stream.state_spec(depth, 1, 2).keys()
        found.append(sum(".source." in name for name in names))
        for connection in blocks[depth] if depth < 4 else ():
            state = connection(state, lambda reads, ctx: reads.x.tanh(), ctx)
    assert found == held


@pytest.mark.parametrize("method", WINDOWED)
@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_sees_nothing_is_refused(method: str, window: int) -> None:
    option = WINDOWED[method]
    with pytest.raises(twoaxis.InputError, match=rf"{method}\({option}={window}\): allowed is 1 or more"):
        twoaxis.parse_spec("depth", f"{method}({option}={window})")
