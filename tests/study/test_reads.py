"""Who reads whom: patterns that are known by hand, and the committed figures."""

from pathlib import Path

import pytest

import twoaxis
from configurations import VARIANTS
from twoaxis.depth import build
from twoaxis.study.figures import figure
from twoaxis.study.links import WIDTH
from twoaxis.study.reads import OWN, depth_links
from twoaxis.study.token_reads import token_links

FIGURES = Path(__file__).parents[2] / "docs" / "methods" / "figures"
AXES = ("depth", "sequence")
METHODS = [(axis, name) for axis in AXES for name in twoaxis.methods(axis)]


def rows(spec: str, *wanted: str) -> list[str]:
    """The marks of some rows, the outputs of the own block apart."""
    links = depth_links(spec)
    by_name = dict(zip(links.rows, links.marks, strict=True))
    return [by_name[row][:-1] for row in wanted]


@pytest.mark.parametrize(("axis", "name"), METHODS, ids=lambda x: x)
def test_committed_figures_are_up_to_date(axis, name):
    """`twoaxis methods --figures docs/methods/figures` makes them again."""
    assert (FIGURES / f"{name}.svg").read_text(encoding="utf-8") == figure(axis, name)


def test_there_is_no_other_figure():
    assert {path.stem for path in FIGURES.iterdir()} == {name for _, name in METHODS}


@pytest.mark.parametrize(
    ("spec", "columns", "attention_4", "write_4", "end"),
    [
        ("additive", "stream", "#", "#", "#"),
        ("depth_window", "0 1 2 3 4", "ooo# ", "ooo# ", "    #"),
        ("depth_window(window_blocks=2)", "0 1 2 3 4", "  o# ", "  o# ", "    #"),  # sources 0, 1 have left
        ("depth_window(injection='replace')", "0 1 2 3 4", "#### ", "#### ", "    #"),
        ("elc_bert", "0 1 2 3 4", "#### ", ".... ", "    #"),  # what a block writes has no skip
        ("elc_bert(variant='weighted_output')", "0 1 2 3 4", "#### ", ".... ", "#####"),
        ("denseformer(dilation=2)", "stream 0 1 2", "#. .", "#o o", "#   "),  # X_4 reads X_0 and X_2
        ("muddformer", "0 1 2 3 4", "ooo# ", "ooo# ", "oooo#"),
        ("residual_scalars", "stream embedding", "#o", "#o", "# "),
        ("svformer", "stream value", "##", "#.", "# "),
        ("lime", "stream 0 1 2", "####", "#...", "#   "),
        ("lime(start='standard')", "stream 0 1 2", "#ooo", "#...", "#   "),
    ],
    ids=str,
)
def test_depth_patterns(spec, columns, attention_4, write_4, end):
    links = depth_links(spec)
    assert [c.rsplit(".", 1)[-1] for c in links.columns] == [*columns.split(), OWN]
    assert rows(spec, "attention 4", "write 4", "end") == [attention_4, write_4, end]


def test_a_window_with_a_sink_and_block_sums():
    assert rows("attnres(window_sources=2)", "attention 3", "mlp 3")[0].strip(" .").replace(" ", "") == "###"
    links = depth_links("attnres(block_sublayers=3)")
    names = [c.rsplit(".", 1)[-1] for c in links.columns]
    read = {
        row: {n for n, m in zip(names, marks, strict=True) if m == "#"}
        for row, marks in zip(links.rows, links.marks, strict=True)
    }
    assert read["attention 2"] == {"0", "partial"}  # two sublayers done: the block of three is open
    assert read["mlp 2"] == {"0", OWN, "partial"}  # the third closed it: b_1 holds the partial sum
    assert read["attention 3"] == {"0", "1", "partial"}
    assert read["attention 4"] == {"0", "1", "2"}


def test_base_elc_bert_keeps_the_block_input_from_its_mlp():
    assert rows("elc_bert(variant='base')", "attention 3", "mlp 3") == ["###  ", "...  "]


EVERY = [*twoaxis.methods("depth"), *(pytest.param(v, marks=pytest.mark.full) for v in VARIANTS)]


@pytest.mark.parametrize("name", EVERY)
def test_columns_are_the_declared_state(name):
    stream, _ = build(name, WIDTH, [["attention", "mlp"]] * 4, n_heads=2, n_kv_heads=2)
    declared = {tensor for depth in range(5) for tensor in stream.state_spec(depth, 1, 2)}
    assert set(depth_links(name).columns) - {OWN} == declared


@pytest.mark.parametrize(
    ("spec", "row_8"),
    [
        ("attention", "#########..."),
        ("short_swa", ".....####..."),
        ("short_swa(field='chunk')", "........#..."),
        ("short_swa(field='two_chunk')", "....#####..."),
        ("short_swa(start='zero')", ".....oooo..."),
        ("short_swa(sink_tokens=1)", "#....####..."),
        ("short_conv(start='identity')", ".....ooo#..."),
        ("canon(kernel=2)", ".......##..."),
        ("token_shift", ".......o#..."),
        ("mlp", "........#..."),
        ("parallel(short_swa, mlp)", ".....####..."),
    ],
    ids=str,
)
def test_token_patterns(spec, row_8):
    (links,) = token_links(spec)
    assert links.marks[8] == row_8
    assert all(set(row[t + 1 :]) <= {"."} for t, row in enumerate(links.marks))  # causal


def test_a_preset_has_a_panel_for_each_core():
    titles = [links.title for links in token_links("local_to_global(mixer='canon')")]
    assert titles == ["canon", "attention", "mlp"]


def test_figures_tell_in_words_what_they_show():
    text = figure("depth", "denseformer")
    assert text.startswith("<svg xmlns=")
    assert text.endswith("</svg>\n")
    assert "write 2: reads stream, this block; once trained also sources.source.0, sources.source.1" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # loads nothing
