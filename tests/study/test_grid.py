"""Studies from Python, from YAML and from command-line text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from twoaxis.cost import budget_of
from twoaxis.errors import InputError
from twoaxis.model import ModelConfig
from twoaxis.study import Row, Study, cross, grid_of, preset, read_study, seeds_of, study_from, with_steps
from twoaxis.study.file import split_sublayers
from twoaxis.train import TrainConfig

SMALL = TrainConfig(model=ModelConfig(d_model=16, n_blocks=2, n_heads=2), seq_len=16, batch_size=2, steps=6)
LOCAL = ("short_swa(window=4)", "attention", "mlp")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("attention,mlp", ("attention", "mlp")),
        ("short_swa(window=16, sink=True), mlp", ("short_swa(window=16, sink=True)", "mlp")),
        ("attention(pattern='S,L', window=3),mlp", ("attention(pattern='S,L', window=3)", "mlp")),
        ("parallel(attention, mlp(act='gelu'))", ("parallel(attention, mlp(act='gelu'))",)),
    ],
    ids=["plain", "brackets", "quotes", "nested"],
)
def test_sublayers_split_at_top_level_commas(text: str, parts: tuple[str, ...]) -> None:
    assert split_sublayers(text) == parts


@pytest.mark.parametrize("text", ["", "attention,,mlp", "attention,", "mlp(hidden=3", "mlp)hidden=3("])
def test_unreadable_sublayers_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        study_from({"depth": ["additive"], "sequence": [text]})


def test_cross_product_has_every_pair_named_by_what_differs() -> None:
    rows = grid_of(["additive", "denseformer"], ["attention,mlp", ",".join(LOCAL)])
    assert [(r.depth, r.sequence) for r in rows] == [
        ("additive", ("attention", "mlp")),
        ("additive", LOCAL),
        ("denseformer", ("attention", "mlp")),
        ("denseformer", LOCAL),
    ]
    assert rows[1].name == "additive [short_swa(window=4), attention, mlp]"
    assert [r.name for r in grid_of(["additive", "denseformer"], [])] == ["additive", "denseformer"]
    assert [r.name for r in grid_of([], ["attention,mlp", "mlp"])] == ["[attention, mlp]", "[mlp]"]


def test_preset_is_the_six_rows() -> None:
    study = preset()
    methods = [(row.depth.partition("(")[0], len(row.sequence)) for row in study.rows]
    assert methods == [
        ("additive", 2),
        ("denseformer", 2),
        ("attnres", 2),
        ("hyper_connections", 2),
        ("ddl", 2),
        ("additive", 3),
    ]
    assert (study.training.data, study.seeds, study.match) == ("shakespeare", (0,), "width")
    assert {study.config(row, 0).model.d_model for row in study.rows} == {study.training.model.d_model}


def test_runs_share_everything_but_model_and_seed() -> None:
    study = Study(
        rows=cross(["additive", "denseformer"], [("attention", "mlp")]), seeds=(0, 7), training=SMALL
    )
    assert [(row.name, seed) for row, seed in study.runs()] == [
        ("additive", 0),
        ("denseformer", 0),
        ("additive", 7),
        ("denseformer", 7),
    ]
    configs = [study.config(row, seed).to_dict() for row, seed in study.runs()]
    for cfg, (row, seed) in zip(configs, study.runs(), strict=True):
        assert (cfg.pop("seed"), cfg.pop("model")["depth"]) == (seed, row.depth)
    assert all(cfg == configs[0] for cfg in configs)


@pytest.mark.parametrize("budget", ["parameters", "flops"])
def test_matching_moves_the_mlp_to_the_baselines_budget(budget: Any) -> None:
    model = ModelConfig(d_model=96, n_blocks=2, n_heads=2)
    training = TrainConfig(model=model, seq_len=32, batch_size=2)
    study = Study(rows=cross(["additive"], [("attention", "mlp"), LOCAL]), match=budget, training=training)
    base, row = (study.config(row, 0).model for row in study.rows)
    assert base == model
    assert row.sequence[-1].startswith("mlp(hidden=")
    counts = [budget_of(cfg, budget, 2, 32) for cfg in (base, row)]
    assert counts[1] == pytest.approx(counts[0], rel=0.01)


def test_row_settings_override_the_studys() -> None:
    study = Study(rows=(Row(name="a"), Row(name="b", train={"lr": 1e-4})), training=SMALL)
    assert [study.config(row, 0).lr for row in study.rows] == [SMALL.lr, 1e-4]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"rows": ()}, "at least one row", id="no-rows"),
        pytest.param({"seeds": ()}, "one or more", id="no-seeds"),
        pytest.param({"seeds": (0, -1)}, "0 or more", id="negative-seed"),
        pytest.param({"seeds": (True,)}, "integers", id="bool-seed"),
        pytest.param({"seeds": (1, 1)}, "given twice", id="seed-twice"),
        pytest.param({"match": "depth"}, "'width' or 'parameters' or 'flops'", id="match"),
        pytest.param({"rows": (Row(name="a"), Row(name="a"))}, "given twice", id="row-twice"),
        pytest.param({"rows": (Row(name="a b"), Row(name="a+b"))}, "folder", id="folder-twice"),
        pytest.param({"rows": (Row(name="a", depth="aditive"),)}, "'additive'", id="depth"),
        pytest.param({"rows": (Row(name="a", train={"seed": 3}),)}, "seed", id="row-seed"),
        pytest.param({"rows": (Row(name="a", train={"lrr": 3}),)}, "'lr'", id="row-setting"),
        pytest.param(
            {"rows": (Row(name="a"), Row(name="b", sequence=("attention",))), "match": "flops"},
            "no mlp",
            id="nothing-to-match",
        ),
    ],
)
def test_bad_studies_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Study(**{"rows": (Row(name="a"),), "training": SMALL, **fields})


@pytest.mark.parametrize(("given", "seeds"), [(1, (0,)), (3, (0, 1, 2)), ([4, 9], (4, 9))])
def test_seeds_are_a_count_or_a_list(given: Any, seeds: tuple[int, ...]) -> None:
    assert seeds_of(given) == seeds


@pytest.mark.parametrize("given", [0, -1, True, "3", 2.0, None])
def test_other_seeds_are_refused(given: Any) -> None:
    with pytest.raises(InputError, match="seeds="):
        seeds_of(given)


def test_written_study_reads_back_equal(tmp_path: Path) -> None:
    import yaml

    rows = (
        Row(name="one"),
        Row(name="each", sequence=(("attention", "mlp"), LOCAL), train={"lr": 1e-3}),
    )
    study = Study(rows=rows, seeds=(3, 5), match="flops", training=SMALL, out="somewhere")
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study.to_dict()), encoding="utf-8")
    again = read_study(tmp_path / "study.yaml")
    assert again.to_dict() == study.to_dict()
    assert [again.config(*run) for run in again.runs()] == [study.config(*run) for run in study.runs()]


YAML = """
rows:
  - additive
  - {name: local, depth: denseformer, sequence: "short_swa(window=4),attention,mlp", train: {lr: 1e-4}}
seeds: 2
match: parameters
train: {steps: 60, tokenizer: "bpe:300", model: {d_model: 16, n_heads: 2}}
"""


def test_yaml_study_starts_from_the_preset(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(YAML, encoding="utf-8")
    study, base = read_study(tmp_path / "s.yaml"), preset().training
    assert [row.name for row in study.rows] == ["additive", "local"]
    assert study.rows[1].sequence == LOCAL
    assert (study.seeds, study.match) == ((0, 1), "parameters")
    assert (study.training.model.d_model, study.training.model.n_blocks) == (16, base.model.n_blocks)
    assert study.training.model.vocab_size == 300
    assert study.training.lr == base.lr
    assert study.training.warmup_steps == round(base.warmup_steps * 60 / base.steps)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        # pitfalls, "Configuration": a misspelled key, or one a level too high -> key and nearest named
        pytest.param({"seed": 3}, "'seed'.*'seeds'", id="key"),
        pytest.param({"train": {"stepz": 3}}, "'stepz'.*'steps'", id="setting"),
        pytest.param({"train": {"d_model": 3}}, "'d_model'.*under `model:`", id="level"),
        pytest.param({"train": {"model": {"d_modl": 3}}}, "'d_modl'.*'d_model'", id="size"),
        pytest.param(
            {"train": {"model": {"depth": "ddl"}}}, "depth belongs in the rows", id="depth-in-train"
        ),
        pytest.param({"train": {"seed": 1}}, "seed", id="seed-in-train"),
        pytest.param({"train": 3}, "settings", id="train"),
        pytest.param({"rows": [{"dpth": "ddl"}]}, "'dpth'.*'depth'", id="row-key"),
        pytest.param({"rows": [3]}, "a row is", id="row"),
        pytest.param({"rows": []}, "at least one", id="rows"),
        pytest.param({"rows": ["additive"], "depth": ["additive"]}, "either rows", id="both"),
        pytest.param({"depth": "additive"}, "must be a list", id="depth"),
        pytest.param({"depth": ["short_swa(windw=8)"]}, "unknown", id="axis"),
        pytest.param({"sequence": ["short_swa(windw=8)"]}, "'windw'.*'window'", id="option"),
    ],
)
def test_bad_files_name_key_and_nearest(data: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        study_from(data, "s.yaml")
    assert "\n" not in str(error.value)


def test_other_lengths_keep_the_shares() -> None:
    training = with_steps(TrainConfig(steps=300, warmup_steps=30, eval_every=60), 20)
    assert (training.steps, training.warmup_steps, training.eval_every) == (20, 2, 4)
    assert with_steps(TrainConfig(steps=300, eval_every=None), 3).eval_every is None


def test_long_names_have_short_distinct_folders() -> None:
    names = ["x" * 100, "x" * 101]
    slugs = [Row(name=name).slug for name in names]
    assert len(set(slugs)) == 2
    assert all(len(slug) <= 60 for slug in slugs)
    assert "/" not in Row(name="../a/b").slug
    assert not Row(name="../a/b").slug.startswith(".")


def test_threads_are_one_or_more() -> None:
    assert preset().threads == 1
    with pytest.raises(InputError, match="threads=0: allowed is 1 or more"):
        dataclasses.replace(preset(), threads=0)
