"""Model configurations: every field survives a save, wrong ones are refused by name."""

import dataclasses
import json

import pytest

import twoaxis
from twoaxis import InputError, ModelConfig

DEFAULTS = ModelConfig()
OTHER = {
    "vocab_size": 300,
    "d_model": 64,
    "n_blocks": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "depth": "additive",
    "sequence": ["short_swa(window=3)", "mlp(hidden=8)"],
    "tie_embeddings": False,
    "norm_eps": 1e-5,
    "rope_base": 500.0,
    "qk_norm": True,
    "dropout": 0.1,
    "init_std": 0.0,
    "state_dtype": "bfloat16",
    "history": "int8",
}
VALUES = {"None": None, "False": False, "0": 0, "empty list": [], "default": ..., "another": "other"}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_every_field_is_kept_or_refused(field, kind):
    # pitfall (Configuration): each field set to None, False, 0, empty list, the default, a non-default
    value = {"default": getattr(DEFAULTS, field), "another": OTHER[field]}.get(kind, VALUES[kind])
    try:
        cfg = ModelConfig(**{"depth": "attnres" if field == "history" else "additive", field: value})
    except InputError as error:
        assert kind not in ("default", "another")
        assert field in str(error) or field == "depth"  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        data = json.loads(cfg.to_json())
        assert set(data) == {
            f.name for f in dataclasses.fields(ModelConfig)
        }  # complete: no default is implied
        again = ModelConfig.from_dict(data)
        assert again == cfg
        assert (getattr(again, field), type(getattr(again, field))) == (value, type(getattr(cfg, field)))


def test_other_covers_every_field():
    assert OTHER.keys() == {f.name for f in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_head": 3}, "model configuration has no field 'n_head'; did you mean 'n_heads'?"),
        ({"window": 8}, "model configuration has no field 'window'"),
        ({"d_model": 10, "n_heads": 4}, "d_model=10 is not a multiple of n_heads=4"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"dropout": 1.0}, "dropout=1.0: allowed is a number below 1"),
        ({"dropout": float("nan")}, "dropout=nan: allowed is a finite number of 0 or more"),
        ({"norm_eps": float("inf")}, "norm_eps=inf: allowed is a finite number of 0 or more"),
        ({"init_std": 10**400}, "init_std=1000"),
        ({"rope_base": 0}, "rope_base=0.0: allowed is a number above 0"),
        ({"vocab_size": True}, "vocab_size=True: allowed is an integer of 1 or more"),
        ({"state_dtype": "int8"}, "state_dtype='int8': allowed is float64 or float32"),
        ({"state_dtype": []}, "state_dtype="),
        ({"sequence": "attention"}, "sequence='attention': give a list of sublayers"),
        ({"sequence": [["mlp"]]}, "sequence has 1 lists and the model 6 blocks"),
        ({"sequence": ["mlp", ["mlp"]], "n_blocks": 2}, "sequence has 'mlp' among lists of sublayers"),
        ({"sequence": [["mlp"], []], "n_blocks": 2}, "give each block a non-empty list"),
        ({"sequence": ["short_swa(windw=8)"]}, "did you mean 'window'?"),
        ({"depth": "aditive"}, "did you mean 'additive'?"),
        ([], "a model configuration is a table of fields such as d_model, not []"),
        ({"depth": None}, "a depth spec must be a line of text"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused(given, message):
    # pitfall (Configuration): 'windw: 8', 'window' one level too high: the key and the nearest valid one
    with pytest.raises(InputError) as caught:
        ModelConfig.from_dict(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_specs_are_written_in_one_way():
    cfg = ModelConfig(depth=" additive() ", sequence=["mlp( hidden = 8 )", "parallel(mlp,attention)"])
    assert (cfg.depth, cfg.sequence) == ("additive", ["mlp(hidden=8)", "parallel(mlp, attention)"])
    assert ModelConfig(sequence=("attention", "mlp")) == ModelConfig()  # tuples are lists


def test_layout_is_what_methods_see():
    cfg = ModelConfig(n_blocks=2, n_kv_heads=2, sequence=[["attention", "mlp(hidden=8)"], ["parallel"]])
    layout = cfg.layout()
    assert layout.blocks == (("attention", "mlp(hidden=8)"), ("parallel",))
    assert (layout.n_blocks, layout.n_sublayers, layout.n_kv_heads) == (2, 3, 2)
    assert [layout.sublayer(0, 1), layout.sublayer(1, 0)] == [1, 2]
    assert twoaxis.ModelConfig().layout().n_kv_heads == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.n_blocks = 3
