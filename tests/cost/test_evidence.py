"""Published results: every one with a source, marked where contested or of one run; a user's file adds to them."""

import pytest

from twoaxis.cost.evidence import about, evidence
from twoaxis.errors import InputError

LINE = (
    "- {{method: {method}, metric: loss, value: 2.0, baseline: 2.5, better: lower, model: m, parameters: 1B, "
    "tokens: 1T, seeds: 3, who: others, source: '{source}'}}\n"
)


def test_every_result_has_a_source_and_doubts_are_marked():
    results = evidence()
    assert all(r.source and r.metric for r in results)
    assert all(
        r.single for r in results if r.seeds is None
    )  # nothing is taken for replicated that is not stated so
    worse = [r for r in results if r.gain is not None and r.gain < 0 and not r.about_price]
    assert worse
    assert all(r.contested for r in worse)
    assert "contested" in worse[0].words()


def test_methods_of_both_axes_have_results():
    kinds = {r.kind for r in evidence()}
    assert {
        "ddl",
        "hyper_connections",
        "mhc",
        "attnres",
        "muddformer",
        "denseformer",
        "canon",
        "short_swa",
    } <= kinds


@pytest.mark.parametrize(("better", "gain"), [("lower", 0.2), ("higher", -0.2)])
def test_gain_is_a_share_of_the_baseline_in_the_metrics_direction(tmp_path, better, gain):
    path = tmp_path / "mine.yaml"
    line = LINE.format(method="ddl", source="mine").replace("better: lower", f"better: {better}")
    path.write_text(line, encoding="utf-8")
    own = evidence(path)[-1]
    assert own.gain == pytest.approx(gain)
    assert not own.single
    assert about(evidence(path), "ddl")[0].method == "ddl"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (LINE.format(method="ddl", source=""), "a result without a source is not taken"),
        (LINE.format(method="dll", source="x"), "did you mean 'ddl'"),
        (
            LINE.format(method="ddl", source="x").replace("better: lower", "better: up"),
            "allowed is lower or higher",
        ),
        (
            LINE.format(method="ddl", source="x").replace("value: 2.0", "value: low"),
            "allowed is a number or null",
        ),
        *(
            (LINE.format(method="ddl", source="x").replace(*change), said)
            for change, said in [
                (("value: 2.0", "value: .nan"), "value=nan: allowed is a number or null"),
                (("seeds: 3", "seeds: three"), "seeds='three': allowed is an integer of 1 or more, or null"),
                (("seeds: 3", "seeds: 0"), "seeds=0: allowed is an integer of 1 or more, or null"),
                (("metric: loss", "metric: 7"), "metric=7: allowed is text"),
                (("tokens: 1T", "tokens: 12"), "tokens=12: allowed is text or null"),
                (("source: 'x'", "source: [a]"), "allowed is text"),
            ]
        ),
        ("- {method: ddl, sorce: x}", "did you mean 'source'"),
        ("a: b", "holds no list"),
        ("[", "is no YAML"),
    ],
    ids=[
        *("no-source", "method", "better", "value", "nan", "seeds", "no-seed", "metric", "tokens", "source"),
        *("field", "no-list", "no-yaml"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path, text, line):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=line) as caught:
        evidence(path)
    assert "\n" not in str(caught.value)


def test_parameters_that_are_no_size_weigh_nothing(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(LINE.format(method="ddl", source="x").replace("1B", "1..2B"), encoding="utf-8")
    assert evidence(path)[-1].scale == 0.0
