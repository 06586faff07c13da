"""`twoaxis methods`: complete as JSON, readable as a table, on any terminal."""

import json
import os
import subprocess
import sys

import pytest

import twoaxis
from twoaxis.cli.main import main

AXES = ("depth", "sequence")


def listed(capsys, *argv: str) -> dict:
    assert main(["methods", "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_complete(capsys):
    data = listed(capsys)
    assert data["size"] == {"d_model": 512, "n_blocks": 12, "n_heads": 8, "seq_len": 512}
    for axis in AXES:
        assert [row["name"] for row in data[axis]] == list(twoaxis.methods(axis))
        for row in data[axis]:
            method = twoaxis.methods(axis)[row["name"]]
            assert (row["equation"], row["source"]) == (method.equation, method.source)
            config = method.Config()
            for option in row["options"]:
                default = getattr(config, option["name"])
                assert option["default"] == (list(default) if isinstance(default, tuple) else default)
                assert option["allowed"]
            assert set(row["coordinates"]) == {
                "source",
                "weights",
                "normalizer",
                "sharing",
                "injection",
                "reads_per_block",
                "short_swa",
            }


def test_numbers_are_those_of_models(capsys):
    """Extra parameters over additive, bytes per token and decode bytes, each against a built model."""
    size = ("--d-model", "24", "--n-blocks", "3", "--n-heads", "2", "--seq-len", "10")
    data = listed(capsys, *size)

    def built(**fields) -> twoaxis.Decoder:
        return twoaxis.Decoder(
            twoaxis.ModelConfig(**{"d_model": 24, "n_blocks": 3, "n_heads": 2, "vocab_size": 7, **fields})
        )

    def count(model) -> int:
        return sum(p.numel() for p in model.parameters())

    plain = built()
    for row in data["depth"]:
        model = built(depth=row["name"])
        assert row["extra_parameters"] == count(model) - count(plain)
        sizes = [sum(t.nbytes for t in model.stream.state_spec(i, 1, 10).values()) for i in range(4)]
        assert max(row["boundary_bytes_per_token"].values()) * 10 == max(sizes)
        extra = model.new_cache(1, 10).nbytes - plain.new_cache(1, 10).nbytes
        assert row["decode_state_bytes"] == extra
        assert row["standard_start"] in ("exact", "up to eps", "no")
        for history, told in row["history_bytes_per_token"].items():
            stream = built(depth=row["name"], history=history).stream
            sizes = [sum(t.nbytes for t in stream.state_spec(i, 1, 10).values()) for i in range(4)]
            assert told * 10 == max(sizes)
        assert bool(row["history_bytes_per_token"]) == model.cfg.depth_config().keeps_history
    for row in data["sequence"]:
        model = built(sequence=[row["name"]], n_blocks=1)
        assert row["parameters_per_sublayer"] == sum(p.numel() for p in model.blocks[0].cores.parameters())
        assert row["decode_state_bytes"] == model.new_cache(1, 10).nbytes
        assert row["separate_qkv_inputs"] == model.blocks[0].cores[0].accepts_qkv


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_fits(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    for axis in AXES:
        assert f"{axis} axis at d_model=512" in text
        for name, method in twoaxis.methods(axis).items():
            assert text.count(name) >= 2  # whole, in the table and below it
            assert method.equation.split()[0] in text
    flat = " ".join(text.split())
    assert "options: none" in flat
    assert "history, bytes per token at a block boundary: full 51,200, bfloat16 25,600" in flat
    assert "hidden=None (int or None), act='swiglu' ('swiglu' or 'gelu'" in flat


@pytest.mark.parametrize("axis", AXES)
def test_one_axis(capsys, axis):
    assert listed(capsys, "--axis", axis, "--n-blocks", "2").keys() == {"size", axis}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--axis", "width"], "all"),
        (["--d-model", "10", "--n-heads", "4"], "d_model=10 is not a multiple of n_heads=4"),
        (["--seq-len", "0"], "--seq-len 0: allowed is 1 or more"),
        (["--n-blocks", "0"], "n_blocks=0: allowed is an integer of 1 or more"),
        (["--d-model", "wide"], "wide"),
        (["--dmodel", "64"], "--d-model"),
        (["--json", "--markdown"], "allowed is one of them"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(capsys, argv, message):
    assert main(["methods", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_under_an_ascii_locale():
    env = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    done = subprocess.run(
        [sys.executable, "-m", "twoaxis", "methods", "--n-blocks", "2"],
        env=env,
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.isascii()
    assert b"hyper_connections" in done.stdout
    assert done.stderr == b""


def test_the_map_as_markdown(capsys):
    assert main(["methods", "--markdown"]) == 0
    out = capsys.readouterr().out
    for axis in AXES:
        assert f"### The {axis} axis" in out
        for name in twoaxis.methods(axis):
            assert out.count(f"[{name}]({name}.md)") == 2  # at a glance, and with its coordinates


def test_figures_are_written(capsys, tmp_path):
    assert main(["methods", "--figures", str(tmp_path / "new")]) == 0
    names = {name for axis in AXES for name in twoaxis.methods(axis)}
    assert {path.name for path in (tmp_path / "new").iterdir()} == {f"{name}.svg" for name in names}
    assert f"wrote {len(names)} figures" in capsys.readouterr().out


def test_figures_need_a_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["methods", "--figures", str(tmp_path / "file")]) == 2
    assert "name a folder" in capsys.readouterr().err
