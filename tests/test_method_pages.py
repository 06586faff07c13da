"""docs/methods: a page for every registered method, each with the same parts, and an index that is up to date."""

import re
from pathlib import Path

import pytest

import twoaxis
import twoaxis.spec
from twoaxis.study.map import tables

PAGES = Path(__file__).parents[1] / "docs" / "methods"
METHODS = [name for axis in ("depth", "sequence") for name in twoaxis.methods(axis)]
PARTS = ["Start", "Cost", "Known results", "Where paper and code differ"]


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_whole_page(name: str) -> None:
    text = page(name)
    assert text.startswith(f"# {name}\n\n    {name}")  # the spec, with its options
    assert [part for part in PARTS if f"**{part}" not in text] == []
    shown = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    assert "──" in shown, "a drawing of the data flow"
    assert re.search(r"\S = .", shown), "an equation"
    assert f"](figures/{name}.svg)" in text


@pytest.mark.parametrize("name", twoaxis.methods("depth"))
def test_every_depth_page_says_how_it_relates_to_short_swa(name: str) -> None:
    place = twoaxis.methods("depth")[name].Config().coordinates()
    answer = re.match(r"yes|extended|no\b", place.short_swa)
    assert answer is not None, place.short_swa
    said = page(name).partition("**ShortSWA?**")[2].strip().lower()
    assert said.startswith(
        {"yes": "yes", "extended": ("extended", "an extended", "the read is")}.get(answer[0], "no")
    )


def test_every_instance_of_attention_over_depth_names_its_test() -> None:
    rows = [line for line in page("index").splitlines() if re.search(r"`(tests/\S+|test_\w+)` \|$", line)]
    for name, method in twoaxis.methods("depth").items():
        if not method.Config().coordinates().short_swa.startswith("no"):
            assert [row for row in rows if f"[`{name}`]" in row], name


def test_every_option_is_on_the_page() -> None:
    missing = [
        f"{name}: {option}"
        for axis in ("depth", "sequence")
        for name, method in twoaxis.methods(axis).items()
        for option in twoaxis.spec.options(method.Config)
        if option not in page(name)
    ]
    assert missing == []


def test_the_index_is_up_to_date() -> None:
    """`twoaxis methods --markdown` prints what belongs at its end."""
    assert page("index").endswith(f"\n\n{tables()}")


def test_links_lead_somewhere() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


def test_named_tests_exist() -> None:
    root = PAGES.parents[1]
    sources = "".join(path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py"))
    for name in ("index", "sketches"):
        for test in re.findall(r"`(test_\w+)`", page(name)):
            assert f"def {test}(" in sources, test
        for file in re.findall(r"`(tests/\S+\.py)`", page(name)):
            assert (root / file).is_file(), file
