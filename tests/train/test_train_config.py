import dataclasses

import pytest
import yaml

from twoaxis import InputError, ModelConfig
from twoaxis.train import TrainConfig, read_yaml

CHANGES = [
    {},
    {"grad_clip": 0},
    {"weight_decay": 0.0, "warmup_steps": 0, "seed": 0},
    {"loggers": []},
    {"loggers": ["wandb", "tensorboard"]},
    {"eval_every": None, "init": None},
    {"eval_every": 7, "eval_tokens": 100, "checkpoint_every": 3, "init": "runs/a"},
    {"compile": True, "checkpointing": True},
    {"compile": False},
    {"betas": [0.8, 0.99], "lr": 1e-20, "eps": 1e-30},
    {"data": "0123", "tokenizer": "bpe:300", "device": "cuda:1"},  # text that YAML could take for a number
    {"data": "no"},
    {"model": ModelConfig(n_kv_heads=2, dropout=0.5, depth="denseformer(dilation=2)", qk_norm=True)},
    {"model": ModelConfig(n_blocks=2, sequence=[["attention"], ["short_swa(window=3)", "mlp"]])},
]


# pitfalls, Configuration: "for each field: set to None, False, 0, empty list, the base default, a
# non-default; save, load -> equal configs; files are complete"
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: ",".join(c) or "defaults")
def test_a_configuration_survives_its_file(change, tmp_path):
    cfg = TrainConfig(**change)
    path = tmp_path / "config.yaml"
    path.write_text(cfg.to_yaml(), encoding="utf-8")
    assert TrainConfig.from_dict(read_yaml(path)) == cfg
    assert TrainConfig.from_dict(cfg.to_dict()) == cfg
    written = yaml.safe_load(cfg.to_yaml())
    assert set(written) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert set(written["model"]) == {f.name for f in dataclasses.fields(ModelConfig)}


# pitfalls, Configuration: "config with 'windw: 8'; with 'window' one level too high -> ... naming the key
# and the nearest valid one" (the exit code is tested with the command)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"windw": 8}, ["'windw'", "did you mean 'window'"]),
        ({"window": 8}, ["'window'", "option of a method", "(window=...)"]),
        ({"model": {"window": 8}}, ["'window' under `model:`", "option of a method"]),
        ({"d_model": 8}, ["'d_model'", "belongs under `model:`"]),
        ({"model": {"d_modl": 8}}, ["'d_modl'", "did you mean 'd_model'"]),
        ({"model": {"lr": 0.1}}, ["'lr' under `model:`", "belongs at the top level"]),
        ({"stepz": 8}, ["'stepz'", "did you mean 'steps'"]),
        ({"xyzzy": 8}, ["'xyzzy'", "known: model, data"]),
        ({"model": 3}, ["field: value"]),
        ([1], ["field: value"]),
    ],
    ids=str,
)
def test_unknown_and_misplaced_fields_are_refused(data, words):
    with pytest.raises(InputError) as error:
        TrainConfig.from_dict(data, "a.yaml")
    assert "a.yaml" in str(error.value)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps=0"),
        (
            {"compile": True, "model": ModelConfig(depth="attnres", history="int8")},
            "compile=True): allowed is False with a history in fewer bits",
        ),
        ({"steps": True}, "steps=True"),
        ({"seed": 2**64}, "0 to 2**64 - 1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"schedule": "cosin"}, "'cosine' or 'wsd' or 'constant'"),
        ({"precision": "fp16"}, "'float32' or 'autocast' or 'bf16_master'"),
        ({"betas": (0.9,)}, "betas"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"loggers": ("mlflow",)}, "tensorboard or wandb or trackio"),
        ({"loggers": "wandb"}, "loggers='wandb'"),
        ({"model": {"d_model": 8}}, "model="),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_values_are_refused(change, words):
    with pytest.raises(InputError, match=r"train\(") as error:
        TrainConfig(**change)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E-3", 1e-3), ("2.5e2", 250.0), ("-1e+2", -100.0), ("'1e-3'", "1e-3")],
)
def test_yaml_numbers_with_exponents_are_numbers(text, value, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"lr: {text}\n", encoding="utf-8")
    assert read_yaml(path) == {"lr": value}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"lr: 1\nlr: 2\n", "'lr' is given twice"),
        (b"a: " + b"[" * 1500, "nested too deeply"),
        (b"a: [1\n", "not YAML"),
        (b"- 1\n", "field: value"),
        (b"\xff\xfe", "UTF-8"),
        (None, "cannot read"),
        (b"!!python/object/apply:os.getcwd []\n", "not YAML"),
    ],
    ids=["twice", "deep", "open-bracket", "list", "bytes", "missing", "python-object"],
)
def test_unreadable_files_are_refused(raw, words, tmp_path):
    path = tmp_path / "a.yaml"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(InputError, match=words):
        read_yaml(path)
