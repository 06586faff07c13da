"""`history=` in words: what it accepts, what it becomes, and what it refuses in one line."""

from __future__ import annotations

import json

import pytest

import twoaxis
from configurations import Case
from twoaxis.depth.history_spec import HistorySpec, parse_history


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("full", HistorySpec()),
        ("int8", HistorySpec(dtype="int8")),
        ("bfloat16,recompute", HistorySpec(dtype="bfloat16", recompute=True)),
        ("window(4), float16", HistorySpec(dtype="float16", window=4)),
        ("block_sums(3)", HistorySpec(block_sums=3)),
    ],
)
def test_text_and_back(text: str, spec: HistorySpec) -> None:
    assert parse_history(text) == spec
    assert parse_history(spec.text()) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int4", "'int4' is not known; allowed is full, bfloat16, float16, int8, recompute, window"),
        ("window(0)", "window is 1 or more"),
        ("window(-1)", "not known"),
        ("window(2.5)", "not known"),
        ("window", "not known"),
        ("int8, bfloat16", "dtype is given twice"),
        ("int8, int8", "dtype is given twice"),
        ("", "not known"),
        (8, "history=8: allowed"),
        (True, "history=True: allowed"),
        (None, "history=None: allowed"),
    ],
)
def test_anything_else_is_refused(text: object, said: str) -> None:
    with pytest.raises(twoaxis.InputError, match=said.replace("(", r"\(")):
        Case("attnres").config(history=text)


@pytest.mark.parametrize(
    ("depth", "history", "expected"),
    [
        ("attnres", "window(4)", ("attnres(window_sources=4)", "full")),
        ("attnres", "block_sums(3), int8", ("attnres(block_sublayers=3)", "int8")),
        (
            "attnres(heads=2)",
            "window(2), block_sums(3)",
            ("attnres(block_sublayers=3, heads=2, window_sources=2)", "full"),
        ),
        ("depth_window", "window(3)", ("depth_window(window_blocks=3)", "full")),
        ("depth_conv", "window(2), recompute", ("depth_conv(kernel=2)", "recompute")),
        ("dca", "window(2)", ("dca(k=2)", "full")),
        ("delta_attnres", "block_sums(2)", ("delta_attnres(form='block', source_blocks=2)", "full")),
        ("depth_window(window_blocks=3)", "window(3)", ("depth_window(window_blocks=3)", "full")),
    ],
)
def test_windows_and_sums_are_the_methods_own_options(
    depth: str, history: str, expected: tuple[str, str]
) -> None:
    cfg = Case(depth).config(history=history)
    assert (cfg.depth, cfg.history) == expected
    assert twoaxis.ModelConfig.from_dict(json.loads(cfg.to_json())) == cfg


@pytest.mark.parametrize(
    ("depth", "history", "said"),
    [
        ("depth_window(window_blocks=2)", "window(3)", "was given window_blocks=2 already; give one of them"),
        ("denseformer", "block_sums(3)", "denseformer has no such option"),
        ("depth_window", "block_sums(3)", "depth_window has no such option"),
    ],
)
def test_what_a_method_cannot_do_is_refused(depth: str, history: str, said: str) -> None:
    with pytest.raises(twoaxis.InputError, match=said):
        Case(depth).config(history=history)
